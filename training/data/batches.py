"""Tokens on disk → global batches.

``open_tokens`` maps the files of ``prepare_tokens`` into memory; ``train_batch`` and
``eval_batches`` read sequences from them. Which tokens a global batch holds depends on the data,
the seed and the step alone, never on the number of ranks.
"""

import contextlib
import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from training.data.text_files import DataError
from training.data.token_cache import PARTS, TokensMeta, open_part, read_meta

# A target that counts nothing.
IGNORE_INDEX = -100
T = TypeVar("T")


class Sequences:
    """A flat token array split into sequences of ``seq_len`` (S) inputs and targets.

    Sequence i has the inputs ``tokens[i*S : (i+1)*S]`` and the targets one further on,
    ``tokens[i*S+1 : (i+1)*S+1]``: neighbours share one token, so that every token but the first is
    a target exactly once. n tokens give floor((n-1)/S) full sequences, ``len()``, which training
    uses, and ceil((n-1)/S) with the partial last one, ``len_with_tail``, which evaluation uses.
    Tokens of the file ``path`` are at most ``largest_id``, or reading them is a :class:`DataError`.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        *,
        path: Path | None = None,
        largest_id: int | None = None,
    ):
        self.tokens, self.seq_len = tokens, seq_len
        self.path, self.largest_id = path, largest_id
        self.len_with_tail = -(-max(len(tokens) - 1, 0) // seq_len)

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.seq_len

    def read(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each int64 [B, S], of the sequences with these indices [B].

        Positions past the data (the tail of the partial last sequence, or a whole sequence) have
        input 0 and target ``IGNORE_INDEX``.
        """
        if not len(self.tokens):
            shape = (len(indices), self.seq_len)
            return torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE_INDEX)
        starts = np.asarray(indices, np.int64)[:, None] * self.seq_len
        where = starts + np.arange(self.seq_len + 1)  # [B, S+1]
        where_read = np.minimum(where, len(self.tokens) - 1)
        window = self.tokens[where_read]
        if self.largest_id is not None and window.max(initial=0) > self.largest_id:
            worst = window.argmax()
            raise DataError(
                f"{self.path}: token {window.flat[worst]} at position {where_read.flat[worst]} "
                f"exceeds {self.largest_id}, the largest that was written: the file has changed; "
                "delete its folder, and the next start builds it again"
            )
        window = window.astype(np.int64)
        past = where[:, 1:] >= len(self.tokens)
        inputs = np.where(past, 0, window[:, :-1])
        targets = np.where(past, IGNORE_INDEX, window[:, 1:])
        return torch.from_numpy(inputs), torch.from_numpy(targets)


@dataclass(frozen=True)
class TokenData:
    """A tokenised corpus. ``content_key`` is equal on two ranks only if their tokens are."""

    train: Sequences
    eval: Sequences
    content_key: str
    documents: int
    skipped_records: int
    train_tokens: int
    eval_tokens: int


def open_tokens(folder: Path, seq_len: int) -> TokenData:
    """Map a folder that ``prepare_tokens`` returned into memory, read-only.

    Raises:
        DataError: if it is damaged, or its training part is too short for one sequence.
    """
    meta = read_meta(folder)
    train, held_out = (_map_tokens(folder, part, meta) for part in PARTS)
    if len(train) < seq_len + 1:
        raise DataError(
            f"--seq-len {seq_len} needs {seq_len + 1} tokens and the training part has "
            f"{len(train)}: use shorter sequences, more text or a smaller --eval-fraction"
        )
    parts = [meta.train_sha256, meta.eval_sha256, meta.tokenizer, seq_len]
    train, held_out = (
        Sequences(tokens, seq_len, path=folder / f"{part}.bin", largest_id=meta.largest_id)
        for part, tokens in zip(PARTS, (train, held_out), strict=True)
    )
    return TokenData(
        train=train,
        eval=held_out,
        content_key=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
        documents=meta.documents,
        skipped_records=meta.skipped_records,
        train_tokens=meta.train_tokens,
        eval_tokens=meta.eval_tokens,
    )


def _map_tokens(folder: Path, part: str, meta: TokensMeta) -> np.ndarray:
    with open_part(folder, part, meta) as file:
        # An empty file cannot be mapped.
        size = os.fstat(file.fileno()).st_size
        return np.memmap(file, meta.dtype, mode="r") if size else np.zeros(0, meta.dtype)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64: a uint64 hash in which every input bit changes half of the output bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_indices(positions: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """The sample [P] at each position [P] of the endless training order.

    Epoch e is the positions ``[e*num_samples, (e+1)*num_samples)`` and holds each sample once, in
    an order of its own. The order is computed, not stored: a stored permutation of 2**33 samples
    takes 64 GB and minutes on every rank, and again for each epoch, while here every position of
    every epoch costs the same, so that a resume starts anywhere at once. A Feistel network permutes
    the smallest domain 4**k >= num_samples; a result of num_samples or more is permuted again until
    it is smaller (cycle walking, at most 4 times on average), which permutes [0, num_samples).

    Raises:
        ValueError: for fewer than one sample.
    """
    if num_samples < 1:
        raise ValueError("there is no sample to choose from")
    positions = np.asarray(positions, np.int64)
    half = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    epochs = (positions // num_samples).astype(np.uint64)
    # One key per position, since a batch may span two epochs.
    key = _mix(_mix(np.full(positions.shape, seed % 2**64, np.uint64)) ^ epochs)

    def permute(x: np.ndarray, key: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for _ in range(8):
            key = _mix(key)
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << half | right

    x = permute((positions % num_samples).astype(np.uint64), key)
    while (outside := x >= num_samples).any():
        x[outside] = permute(x[outside], key[outside])
    return x.astype(np.int64)


def train_batch(
    data: Sequences,
    step: int,
    *,
    global_batch_size: int,
    seed: int,
    dp_rank: int,
    dp: int,
    micro_batch_size: int,
) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches, inputs and targets [B, S] each, of one dp rank in one step (0-based).

    For every dp and micro-batch the global batch is the positions ``[step*G, (step+1)*G)`` of the
    sample order, of which a dp rank takes a contiguous slice.
    """
    per_rank = global_batch_size // dp
    positions = step * global_batch_size + dp_rank * per_rank + np.arange(per_rank)
    inputs, targets = data.read(sample_indices(positions, len(data), seed))
    return list(zip(inputs.split(micro_batch_size), targets.split(micro_batch_size), strict=True))


def num_eval_batches(data: Sequences, global_batch_size: int, max_batches: int = 0) -> int:
    """Global batches of an evaluation, at most ``max_batches``; 0: all."""
    batches = -(-data.len_with_tail // global_batch_size)
    return min(batches, max_batches or batches)


def eval_batches(
    data: Sequences,
    *,
    global_batch_size: int,
    dp_rank: int,
    dp: int,
    micro_batch_size: int,
    max_batches: int = 0,
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The micro-batches [B, S] of one dp rank, a list for each global batch of the held-out
    sequences, in file order.

    Every rank yields as many lists, and over all ranks each held-out target comes once: the last
    global batch is filled with ignored sequences. max_batches counts global batches; 0: all.
    """
    per_rank = global_batch_size // dp
    for batch in range(num_eval_batches(data, global_batch_size, max_batches)):
        first = batch * global_batch_size + dp_rank * per_rank
        inputs, targets = data.read(np.arange(first, first + per_rank))
        yield list(
            zip(inputs.split(micro_batch_size), targets.split(micro_batch_size), strict=True)
        )


def prefetch(make_batch: Callable[[int], T], first_step: int, last_step: int) -> Iterator[T]:
    """Yield ``make_batch(step)`` for the steps [first_step, last_step), computed up to two ahead.

    One thread computes the batches in order. Its error is raised here, after the batches before it.
    """
    ready: queue.Queue = queue.Queue(maxsize=2)
    stop = threading.Event()

    def put(item: tuple) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                return ready.put(item, timeout=0.1)

    def work() -> None:
        try:
            for step in range(first_step, last_step):
                if stop.is_set():
                    return
                put((make_batch(step), None))
        except BaseException as error:  # the consumer must not wait for ever
            put((None, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        for _ in range(first_step, last_step):
            batch, error = ready.get()
            if error is not None:
                raise error
            yield batch
    finally:
        stop.set()
        thread.join(timeout=1)
