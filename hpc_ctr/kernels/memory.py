"""Memory below the other kernels: prefetch and pointers inside numba, and arrays that cost nothing until
touched."""

import contextlib
import mmap

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hpc_ctr.errors import StorageError
from hpc_ctr.units import format_bytes

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_HUGE_BYTES = 64 << 20  # smaller arrays would notice the rounding to pages of 2 MiB


@intrinsic
def pointer(typingctx, address):
    """A void pointer from an integer address, for ``numba.carray``."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at an integer address; a wrong address is harmless."""

    def codegen(context, builder, signature, args):
        int32 = ir.IntType(32)
        where = builder.inttoptr(args[0], cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, int32, int32, int32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [where, int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return types.void(types.uintp), codegen


class LazyArray:
    """A zero-filled array of fixed shape whose pages are taken from the system when they are first touched.

    ``array`` is the numpy view. Reserving far more than will be used is free, so that nothing has to be
    copied when the used part grows.
    """

    def __init__(self, shape: tuple[int, ...], dtype):
        self.dtype = np.dtype(dtype)
        self._row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * self.dtype.itemsize
        nbytes = max(1, int(shape[0]) * self._row_bytes)
        try:
            # private, or the pages would count as shared memory; not reserved, or a big budget would be
            # refused
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except OSError as error:
            raise StorageError(f"storage.host_budget: the system refuses to reserve {format_bytes(nbytes)} "
                               f"({error.strerror}); set a smaller budget") from error
        if nbytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            # rows are read at random: with huge pages their addresses are translated without going to memory
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        count = nbytes // self.dtype.itemsize if shape[0] and self._row_bytes else 0
        self.array = np.frombuffer(self._map, dtype=self.dtype, count=count).reshape(shape)

    def release(self, first_row: int = 0) -> None:
        """Give the pages of the rows from ``first_row`` on back to the system; they read as zero
        afterwards."""
        first = first_row * self._row_bytes
        page = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        self.array.reshape(-1).view(np.uint8)[first:page] = 0
        if page < len(self._map):
            self._map.madvise(mmap.MADV_DONTNEED, page, len(self._map) - page)
