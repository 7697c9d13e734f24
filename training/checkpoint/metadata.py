"""What a checkpoint says of its tensors: DCP's pickle, which may come from elsewhere.

It is read through an unpickler that knows only the classes such metadata is made of, so that it
cannot run code, and what it says is compared with itself before anything is read or filled.
"""

import io
import math
import pickle
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from common.text import printable
from training.checkpoint.folder import DamageError

METADATA = ".metadata"
_IN_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(n for n, v in vars(torch).items() if isinstance(v, torch.dtype))},
}  # fmt: skip
# Of torch.save's archive around the bytes of a shard.
_MAX_ARCHIVE_BYTES = 1 << 16
_MAX_DEPTH = 16
_OPCODES = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET,
    pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1,
    pickle.BININT2, pickle.LONG1, pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.EMPTY_TUPLE,
    pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE, pickle.EMPTY_LIST, pickle.APPEND,
    pickle.APPENDS, pickle.EMPTY_DICT, pickle.STACK_GLOBAL,
)  # fmt: skip
_BUILT = {
    ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties,
    TensorStorageMetadata, _StorageInfo,
}  # fmt: skip


class _MetadataUnpickler(pickle._Unpickler):
    """Builds tensors' descriptions and nothing else.

    Not even DCP's BytesStorageMetadata: an entry of that kind is a pickle of its own. The base is
    Python's unpickler, since C's can be made to take memory without end. Time without end lies in
    the hash of a tuple that holds another one twice, and so on: only plain keys and arguments are
    hashed.
    """

    dispatch: ClassVar = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}

    def find_class(self, module: str, name: str):
        if type(module) is not str or type(name) is not str:
            raise DamageError(f"{METADATA} names a class without words")
        if name not in _IN_METADATA.get(module, ()):
            text = printable(f"{module}.{name}")[:80]
            raise DamageError(f"{METADATA} names {text}, which no checkpoint needs")
        return super().find_class(module, name)

    def load_mark(self) -> None:
        if len(self.metastack) > _MAX_DEPTH:
            raise DamageError(f"{METADATA} is nested too deeply")
        super().load_mark()

    def load_newobj(self) -> None:
        if self.stack[-1] != ():
            raise TypeError("arguments")
        super().load_newobj()

    def load_reduce(self) -> None:
        function, arguments = self.stack[-2:]
        kinds = {type(argument) for argument in arguments}
        if function is not torch.Size and not kinds <= {int, str}:
            raise TypeError("arguments")
        super().load_reduce()

    def load_build(self) -> None:
        kind, state = type(self.stack[-2]), type(self.stack[-1])
        if state is not (tuple if kind is TensorProperties else dict) or kind not in _BUILT:
            raise TypeError("state")
        super().load_build()

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_setitems()

    def _check_keys(self, keys: list) -> None:
        for key in keys:
            if type(key) is MetadataIndex:
                plain = type(key.fqn) is str and type(key.offset) is torch.Size
            else:
                plain = type(key) is str
            if not plain:
                raise TypeError("key")

    dispatch |= {
        pickle.MARK[0]: load_mark,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _fills(boxes: list[list[tuple[int, int]]], size: Sequence[int]) -> bool:
    """Whether boxes, as (start, end) in each dim, fill a tensor of ``size`` and do not overlap.

    Tensors are sharded dim by dim: all boxes between the same two bounds of a dim fill the others.
    """
    if not size:
        return len(boxes) == 1
    slabs: dict[tuple[int, int], list] = {}
    for first, *rest in boxes:
        slabs.setdefault(first, []).append(rest)
    at = 0
    for start, end in sorted(slabs):
        if start != at:
            return False
        at = end
    return at == size[0] and all(_fills(slab, size[1:]) for slab in slabs.values())


def _check_tensor(name: str, tensor: TensorStorageMetadata, places: dict) -> None:
    """Check that the shards of a tensor are the whole of it, and have the bytes that they need."""
    fault = DamageError(f"{METADATA} does not say where all of {printable(name)[:80]} is")
    boxes = []
    for chunk in tensor.chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        if not type(offsets) is type(sizes) is torch.Size or not (
            len(offsets) == len(sizes) == len(tensor.size)
        ):
            raise fault
        if 0 in sizes:
            continue  # of a rank that has no row of it
        boxes.append([(o, o + n) for o, n in zip(offsets, sizes, strict=True)])
        place = places.get(MetadataIndex(name, offsets))
        if place is None or min((0, *offsets, *sizes)) < 0:
            raise fault
        size = math.prod(sizes) * tensor.properties.dtype.itemsize
        if not size <= place.length <= size + _MAX_ARCHIVE_BYTES:
            raise fault
    if 0 not in tensor.size and not _fills(boxes, tensor.size):
        raise fault


def _file_sizes(metadata: Metadata) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for place in metadata.storage_data.values():
        name, start, length = place.relative_path, place.offset, place.length
        numbers = type(start) is type(length) is int and start >= 0 and length >= 0
        if not numbers or type(name) is not str or getattr(place, "transform_descriptors", None):
            raise DamageError(f"{METADATA} has a place that is none")
        sizes[name] = max(sizes.get(name, 0), start + length)
    return sizes


def parse_metadata(data: bytes) -> tuple[Metadata, dict[str, int]]:
    """The description of all tensors, and the bytes that each file with shards needs, by name.

    Raises:
        DamageError: if it is anything but the description of whole tensors.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        # Together these say where each byte lies; nothing else of a checkpoint is a path.
        sizes = _file_sizes(metadata)
        for name, tensor in metadata.state_dict_metadata.items():
            _check_tensor(name, tensor, metadata.storage_data)
    except DamageError:
        raise
    except Exception as error:  # unpickling damaged bytes raises nearly every type
        raise DamageError(f"{METADATA} cannot be read ({type(error).__name__})") from None
    return metadata, sizes
