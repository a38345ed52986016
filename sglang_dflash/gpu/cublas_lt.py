"""Matrix products by one of cuBLASLt's algorithms that is named, where the one it takes by itself is not the fastest.

PyTorch loads the library and asks it for one algorithm; it does not let anybody name another. Here the library is
called as its documentation says (https://docs.nvidia.com/cuda/cublas, "Using the cuBLASLt API"). Only while graphs are
captured, so that it does not matter what a call from Python takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

WORKSPACE = 32 << 20  # bytes that an algorithm may need
_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_TRANSPOSE_A, _TRANSPOSED = 3, 1
_MOST_BYTES, _REDUCTIONS = 1, 3  # of preferences
_IN_FLOAT32 = 2  # parts of a product are added in float32
_OFFERED = 16


class Algorithm(NamedTuple):
    """As the library numbers its algorithms and what can be chosen of them.

    `splits` are parts of the inner dimension, `cluster` says which multiprocessors share what they load.
    """

    id: int
    tile: int
    stages: int
    splits: int
    reduction: int
    swizzle: int
    custom: int
    inner: int
    cluster: int

    def fits(self, size: int, depth: int) -> bool:
        """The library says itself what does not fit."""
        return True


# `cublasLtMatmulAlgoConfigAttributes_t`.
_FIELDS = {
    "id": (0, ctypes.c_int32),
    "tile": (1, ctypes.c_uint32),
    "stages": (6, ctypes.c_uint32),
    "splits": (2, ctypes.c_int32),
    "reduction": (3, ctypes.c_uint32),
    "swizzle": (4, ctypes.c_uint32),
    "custom": (5, ctypes.c_uint32),
    "inner": (7, ctypes.c_uint16),
    "cluster": (8, ctypes.c_uint16),
}


class _Algo(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Found(ctypes.Structure):
    _fields_ = [
        ("algo", _Algo),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Ready(NamedTuple):
    algo: _Algo
    workspace: int


class _Product:
    """Products of some rows with weights of one shape."""

    def __init__(self, rows: int, size: int, depth: int):
        self._library, self._handle = _library(), _handle()
        self._desc = ctypes.c_void_p()
        self._call("MatmulDescCreate", ctypes.byref(self._desc), _COMPUTE_32F, _R_32F)
        transposed = ctypes.c_int32(_TRANSPOSED)
        self._call("MatmulDescSetAttribute", self._desc, _TRANSPOSE_A, *_value(transposed))
        # The library has its matrices by columns: weights are transposed, and so is what comes out.
        self._weight, self._x = self._layout(depth, size), self._layout(depth, rows)
        self._y = self._layout(size, rows)
        self._ready: dict[Algorithm, _Ready] = {}

    def offered(self) -> list[Algorithm]:
        """What the library takes to be fast, its choice first."""
        preference, most = ctypes.c_void_p(), ctypes.c_size_t(WORKSPACE)
        self._call("MatmulPreferenceCreate", ctypes.byref(preference))
        in_float32 = ctypes.c_uint32(_IN_FLOAT32)
        for name, value in ((_MOST_BYTES, most), (_REDUCTIONS, in_float32)):
            self._call("MatmulPreferenceSetAttribute", preference, name, *_value(value))
        found, count = (_Found * _OFFERED)(), ctypes.c_int()
        end = (preference, _OFFERED, found, ctypes.byref(count))
        self._call("MatmulAlgoGetHeuristic", self._handle, *self._matrices(), *end)
        self._call("MatmulPreferenceDestroy", preference)
        return [self._read(each.algo) for each in found[: count.value] if each.state == 0]

    def run(self, x: torch.Tensor, weight: torch.Tensor, algorithm: Algorithm) -> torch.Tensor:
        ready = self._prepared(algorithm)
        y = x.new_empty(len(x), len(weight))
        workspace = torch.empty(ready.workspace, dtype=torch.uint8, device=x.device)
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        w_at, x_at, y_at, work_at = (
            ctypes.c_void_p(each.data_ptr()) for each in (weight, x, y, workspace)
        )
        self._call(
            "Matmul",
            *(self._handle, self._desc, ctypes.byref(one), w_at, self._weight, x_at, self._x),
            *(ctypes.byref(zero), y_at, self._y, y_at, self._y, ctypes.byref(ready.algo)),
            *(work_at, ctypes.c_size_t(ready.workspace)),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        return y

    def _prepared(self, algorithm: Algorithm) -> _Ready:
        if algorithm not in self._ready:
            algo, found = _Algo(), _Found()
            kinds = (_COMPUTE_32F, _R_32F, _R_16BF, _R_16BF, _R_16BF, _R_16BF)
            made = ctypes.byref(algo)
            self._call("MatmulAlgoInit", self._handle, *kinds, algorithm.id, made)
            for name, (number, kind) in _FIELDS.items():
                if name != "id":
                    value = kind(getattr(algorithm, name))
                    self._call("MatmulAlgoConfigSetAttribute", made, number, *_value(value))
            checked = (*self._matrices(), made, ctypes.byref(found))
            self._call("MatmulAlgoCheck", self._handle, *checked)
            if found.workspace > WORKSPACE:
                raise RuntimeError(f"cuBLASLt wants {found.workspace} bytes for {algorithm}.")
            self._ready[algorithm] = _Ready(algo, found.workspace)
        return self._ready[algorithm]

    def _read(self, algo: _Algo) -> Algorithm:
        return Algorithm(**dict(self._values(algo)))

    def _values(self, algo: _Algo) -> Iterator[tuple[str, int]]:
        for name, (number, kind) in _FIELDS.items():
            value, written = kind(), ctypes.c_size_t()
            end = (*_value(value), ctypes.byref(written))
            self._call("MatmulAlgoConfigGetAttribute", ctypes.byref(algo), number, *end)
            yield name, value.value

    def _matrices(self) -> tuple[ctypes.c_void_p, ...]:
        return self._desc, self._weight, self._x, self._y, self._y

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        self._call("MatrixLayoutCreate", ctypes.byref(made), _R_16BF, *sizes)
        return made

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, f"cublasLt{name}")(*arguments):
            raise RuntimeError(f"cuBLASLt: cublasLt{name} returned {status}.")


def multiply(x: torch.Tensor, weight: torch.Tensor, algorithm: Algorithm) -> torch.Tensor:
    """[n, in] × [out, in] → [n, out], of bfloat16 on a GPU, both contiguous.

    Raises:
        RuntimeError: the library cannot do that by this algorithm.
    """
    return _product(len(x), *weight.shape).run(x.contiguous(), weight, algorithm)


def offered(rows: int, size: int, depth: int) -> list[Algorithm]:
    """What the library takes to be fast for products of so many rows with [size, depth], its choice first.

    Raises:
        RuntimeError, OSError: there is no such library.
    """
    return _product(rows, size, depth).offered()


def version() -> int:
    """Of the library that PyTorch has loaded; 0 if there is none."""
    try:
        return _library().cublasLtGetVersion()
    except (OSError, RuntimeError):
        return 0


@cache
def _product(rows: int, size: int, depth: int) -> _Product:
    return _Product(rows, size, depth)


@cache
def _library() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise RuntimeError("This PyTorch has no CUDA, and so no cuBLASLt.")
    library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library


@cache
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    if status := _library().cublasLtCreate(ctypes.byref(handle)):
        raise RuntimeError(f"cuBLASLt: cublasLtCreate returned {status}.")
    return handle


def _value(value: ctypes._SimpleCData) -> tuple[object, ctypes.c_size_t]:
    return ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
