"""The release's manager of LoRA adapters, which looks at each before it takes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.lora.lora_manager import LoRAManager

from sglang_dflash.checkpoint.adapter import Adapter, check_adapter, check_limits, read_adapter
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.io_struct import LoRAUpdateOutput


class CheckingLoRAManager(LoRAManager):
    """
    Attributes:
        held: adapters that a round still reads whose draws are not launched; their weights stay where they are.
    """

    held: frozenset[str | None] = frozenset()

    def __init__(self, *args: Any, server_args: Any, **rest: Any):
        self._path = server_args.model_path
        super().__init__(*args, server_args=server_args, **rest)

    def load_lora_adapter(self, lora_ref: LoRARef) -> LoRAUpdateOutput:
        """Loads one from a folder; what does not fit is refused with one sentence."""
        try:
            self._check(read_adapter(lora_ref.lora_name, lora_ref.lora_path))
        except DFlashError as error:
            return self.create_lora_update_result(success=False, error_message=str(error))
        return super().load_lora_adapter(lora_ref)

    def load_lora_adapter_from_tensors(
        self,
        lora_ref: LoRARef,
        tensors: dict[str, torch.Tensor],
        config_dict: dict,
        added_tokens_config: dict | None = None,
    ) -> LoRAUpdateOutput:
        """Loads one from tensors; likewise."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        try:
            self._check(Adapter(f"LoRA adapter {lora_ref.lora_name}", config_dict, shapes))
        except DFlashError as error:
            return self.create_lora_update_result(success=False, error_message=str(error))
        return super().load_lora_adapter_from_tensors(
            lora_ref, tensors, config_dict, added_tokens_config
        )

    def fetch_new_loras(
        self, new_loras: set[str | None], running_loras: set[str | None] = frozenset()
    ) -> None:
        """Brings adapters of a batch to the device, in the place of others that nobody reads."""
        super().fetch_new_loras(set(new_loras), set(running_loras) | self.held)

    def places_of(self, ids: Iterable[str | None]) -> list[int]:
        """Where in the pool adapters are that were fetched; None, no adapter, has a place, too."""
        return [self.memory_pool.get_buffer_id(each) for each in ids]

    def name_of(self, lora_id: str) -> str:
        """What its users call an adapter."""
        ref = self.lora_refs.get(lora_id)
        return lora_id if ref is None else ref.lora_name

    def _check(self, adapter: Adapter) -> None:
        check_adapter(adapter, self.base_hf_config, self._path)
        if (pool := getattr(self, "memory_pool", None)) is not None:
            check_limits(adapter, pool.max_lora_rank, pool.target_modules)
