"""`--enable-hierarchical-cache`: prefixes that the device has no room for wait on the host, with K/V of both models.

The release's prefix cache copies the target's K/V to a pool on the host and back. Draft K/V lies under the target's
slots, and so it does on the host: a second pool there, as many slots, the same numbers, filled and read by the
same copies. What is freed, locked or evicted is decided once, for both.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.memory_pool_host import HostKVCache, MHATokenToKVPoolHost

from sglang_dflash.serving.host_cache import host_slots
from sglang_dflash.serving.memory import pool_bytes

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from sglang.srt.server_args import ServerArgs

    from sglang_dflash.scheduler.base import DFlashWorkerBase

logger = logging.getLogger(__name__)


class BothOnHost:
    """The target's pool on the host, whose copies take the draft model's K/V along; all else is the target's own."""

    def __init__(self, target: HostKVCache, draft: HostKVCache):
        """
        Args:
            draft: of as many slots.
        """
        self._target, self._draft = target, draft

    def backup_from_device_all_layer(
        self, pool: Any, to: torch.Tensor, slots: torch.Tensor, io_backend: str
    ) -> None:
        """Copies `slots` of both device pools to slots `to` of the host; [n] int64 both."""
        self._target.backup_from_device_all_layer(pool, to, slots, io_backend)
        self._draft.backup_from_device_all_layer(self._draft.device_pool, to, slots, io_backend)

    def load_to_device_per_layer(
        self, pool: Any, of: torch.Tensor, slots: torch.Tensor, layer_id: int, io_backend: str
    ) -> None:
        """Copies slots `of` the host to `slots` of the target's layer; with its last layer all of the draft model's.

        The target waits for each layer where it reads it. So when its pass is through, both models' K/V is there.
        """
        self._target.load_to_device_per_layer(pool, of, slots, layer_id, io_backend)
        if layer_id < self._target.layer_num - 1:
            return
        draft = self._draft
        for layer in range(draft.layer_num):
            draft.load_to_device_per_layer(draft.device_pool, of, slots, layer, io_backend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class BothInHiRadixCache(HiRadixCache):
    """SGLang's prefix cache with a tier on the host, of both models."""

    def __init__(self, params: CacheInitParams, args: ServerArgs, worker: DFlashWorkerBase):
        target = params.token_to_kv_pool_allocator.get_kvcache()
        draft = worker.model_runner.token_to_kv_pool
        on_device = target.size + params.page_size
        each = [pool_bytes(pool) // on_device for pool in (target, draft)]
        slots = host_slots(args, target.size, sum(each))
        # The release knows the target's bytes only; this ratio gives it as many slots.
        args = copy.copy(args)
        args.hicache_size, args.hicache_ratio = 0, (slots + 0.5) / target.size
        super().__init__(params, args)
        controller = self.cache_controller
        drafts = MHATokenToKVPoolHost(
            draft, args.hicache_ratio, 0, params.page_size, args.hicache_mem_layout
        )
        controller.mem_pool_host = BothOnHost(self.token_to_kv_pool_host, drafts)
        self._rounds = worker.target_worker.model_runner.forward_stream
        logger.info(
            "DFLASH host cache: %d bytes of target KV and %d of draft KV a slot, %d slots, %.2f GB; %s by %s, %s",
            *each,
            drafts.size,
            drafts.size * sum(each) / 1e9,
            args.hicache_mem_layout,
            args.hicache_io_backend,
            args.hicache_write_policy,
        )

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        """Begins to copy a node to the host; how many tokens, 0 if there is no room.

        Of the request that left it, an overlapped round in vain may still write the last token's K/V.
        """
        self.cache_controller.write_stream.wait_stream(self._rounds)
        return super().write_backup(node, write_back)

    def ready_to_load_host_cache(self) -> int:
        """Begins to load what the next batch reads, if anything; a number by which the batch waits for it.

        An overlapped round of a request that has finished may still run, in vain. Its slots are free, and what is
        loaded there must not be overwritten.
        """
        controller = self.cache_controller
        if controller.load_queue:
            controller.load_stream.wait_stream(self._rounds)
        return super().ready_to_load_host_cache()

    def attach_storage_backend(self, storage_backend: str, *_: Any, **__: Any) -> tuple[bool, str]:
        """Refused, as the flag is: a storage backend reads and writes the target's pages only."""
        return False, (
            f"hicache_storage_backend {storage_backend} is not supported with DFLASH, because it would not hold the "
            "draft model's K/V: use the host's memory alone."
        )
