"""The release's memory saver on a CPU, where the library that it uses on a GPU cannot be loaded.

Pages of tensors that are made in a region go back to the system when its tag is paused. Addresses stay. What resumed
memory holds is undefined on a GPU; here it is NaN, and -1 where integers are, so that nobody gets used to it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass
class _Memory:
    """Of one storage, which it does not keep alive."""

    storage: StorageWeakRef
    address: int
    size: int
    backed_up: bool
    backup: bytes | None = field(default=None, repr=False)

    def drop(self) -> None:
        if self.backed_up:
            self.backup = ctypes.string_at(self.address, self.size)
        page, end = mmap.PAGESIZE, self.address + self.size
        first, last = -(-self.address // page) * page, end // page * page
        if first >= last:
            ctypes.memset(self.address, 0, self.size)
            return
        # What is on the first and the last page besides belongs to others.
        ctypes.memset(self.address, 0, first - self.address)
        ctypes.memset(last, 0, end - last)
        if _LIBC.madvise(first, last - first, mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")

    def put_back(self) -> None:
        if self.backup is None:
            ctypes.memset(self.address, 0xFF, self.size)
            return
        ctypes.memmove(self.address, self.backup, self.size)
        self.backup = None


# By tag, of all adapters of a process: each part of the release makes its own.
_regions: dict[str, list[_Memory]] = {}


class CpuMemorySaver(TorchMemorySaverAdapter):
    """See the module."""

    enabled = True

    @contextmanager
    def configure_subprocess(self) -> Iterator[None]:
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        yield

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Takes note of the memory of tensors that are made within it."""
        with _Notes(_regions.setdefault(tag, []), enable_cpu_backup):
            yield

    def pause(self, tag: str) -> None:
        _regions[tag] = [each for each in _regions.get(tag, ()) if not each.storage.expired()]
        for memory in _regions[tag]:
            memory.drop()

    def resume(self, tag: str) -> None:
        for memory in _regions.get(tag, ()):
            memory.put_back()


class _Notes(TorchDispatchMode):
    """Which storages are made by operations, and not given to them."""

    def __init__(self, made: list[_Memory], backed_up: bool):
        super().__init__()
        self._made, self._backed_up = made, backed_up

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.data_ptr() for each in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            address, size = storage.data_ptr(), storage.nbytes()
            if size and address not in given:
                weak = StorageWeakRef(storage)
                self._made.append(_Memory(weak, address, size, self._backed_up))
        return result


def _storages(of: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(of)
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
    ]
