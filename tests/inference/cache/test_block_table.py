"""Block tables against a plain list: every operation leaves the right tokens in the right slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from specrag_inference.cache.block_pool import BlockPool, OutOfBlocksError
from specrag_inference.cache.block_table import BlockTable

if TYPE_CHECKING:
    from specrag_inference.cache.storage import SlotIds

BLOCK_SIZE = 4


class TokenMemory:
    """Stands for the key/value memory: remembers which token each slot holds."""

    def __init__(self, num_slots: int) -> None:
        self.slots = np.full(num_slots, -1, dtype=np.int64)

    def copy_slots(self, source: SlotIds, destination: SlotIds) -> None:
        self.slots[destination] = self.slots[source]


def build_table(pool: BlockPool, memory: TokenMemory) -> BlockTable:
    return BlockTable(pool, memory, block_size=BLOCK_SIZE, root_hash=b"root", headroom_blocks=2)


def write(table: BlockTable, memory: TokenMemory, token_ids: list[int]) -> None:
    """Write tokens behind the committed ones, as a forward pass does."""
    start = table.num_tokens
    table.reserve(start + len(token_ids))
    memory.slots[table.slots(start, start + len(token_ids))] = token_ids


def adopt(table: BlockTable, token_ids: list[int]) -> int:
    return table.adopt_prefix(table.compute_prefix_hashes(token_ids))


def read(table: BlockTable, memory: TokenMemory) -> list[int]:
    runs = table.slot_runs(table.num_tokens)
    return [int(token) for start, stop in runs for token in memory.slots[start:stop]]


def test_accepted_nodes_are_moved_together_and_the_rest_is_freed() -> None:
    pool, memory = BlockPool(16), TokenMemory(16 * BLOCK_SIZE)
    table = build_table(pool, memory)
    write(table, memory, [1, 2, 3])
    table.extend(3)
    write(table, memory, [10, 11, 12, 13, 14, 15, 16, 17])
    table.accept([1, 4, 5, 7])
    assert read(table, memory) == [1, 2, 3, 11, 14, 15, 17]
    assert len(table.block_ids) == 2
    assert pool.num_free == 14


def test_writing_behind_a_fork_copies_the_shared_block_once() -> None:
    pool, memory = BlockPool(16), TokenMemory(16 * BLOCK_SIZE)
    table = build_table(pool, memory)
    write(table, memory, [1, 2, 3, 4, 5, 6])
    table.extend(6)
    twin = table.fork()
    assert twin.count_missing_blocks(7) == 1
    write(twin, memory, [70])
    twin.extend(1)
    write(table, memory, [60])
    table.extend(1)
    assert read(table, memory) == [1, 2, 3, 4, 5, 6, 60]
    assert read(twin, memory) == [1, 2, 3, 4, 5, 6, 70]
    assert table.block_ids[0] == twin.block_ids[0]
    assert table.block_ids[1] != twin.block_ids[1]


def test_rewriting_a_published_block_makes_its_prefix_unfindable() -> None:
    pool, memory = BlockPool(16), TokenMemory(16 * BLOCK_SIZE)
    table = build_table(pool, memory)
    write(table, memory, [1, 2, 3, 4])
    table.extend(4)
    table.publish([1, 2, 3, 4])
    table.trim(2)
    write(table, memory, [9, 9])
    table.extend(2)
    other = build_table(pool, memory)
    assert adopt(other, [1, 2, 3, 4]) == 0
    table.publish([1, 2, 9, 9])
    assert adopt(other, [1, 2, 9, 9]) == 4


def test_reserving_beyond_the_pool_leaves_the_table_unchanged() -> None:
    pool, memory = BlockPool(2), TokenMemory(2 * BLOCK_SIZE)
    table = build_table(pool, memory)
    write(table, memory, [1, 2, 3, 4, 5])
    table.extend(5)
    twin = table.fork()
    try:
        twin.reserve(20)
    except OutOfBlocksError:
        pass
    else:
        raise AssertionError("the pool has no block left")
    pool.check_integrity([table.block_ids, twin.block_ids])
    assert read(twin, memory) == [1, 2, 3, 4, 5]


class TableMachine(RuleBasedStateMachine):
    """Random allocate, write, accept, fork, publish, adopt, trim and free, against lists."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24)
        self.memory = TokenMemory(24 * BLOCK_SIZE)
        self.tables: list[tuple[BlockTable, list[int]]] = []

    def pick(self, data: st.DataObject) -> tuple[BlockTable, list[int]]:
        return self.tables[data.draw(st.integers(0, len(self.tables) - 1))]

    @rule(tokens=st.lists(st.integers(0, 1), max_size=14))
    def open(self, tokens: list[int]) -> None:
        table = build_table(self.pool, self.memory)
        kept = adopt(table, tokens)
        held = tokens[:kept]
        self.tables.append((table, held))
        self.extend_committed(table, held, tokens[kept:])

    def extend_committed(self, table: BlockTable, held: list[int], tokens: list[int]) -> None:
        if table.count_missing_blocks(len(held) + len(tokens)) > self.pool.num_free:
            return
        write(table, self.memory, tokens)
        table.extend(len(tokens))
        held += tokens

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def commit_chain(self, data: st.DataObject, tokens: list[int]) -> None:
        table, held = self.pick(data)
        self.extend_committed(table, held, tokens)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tree=st.lists(st.integers(2, 5), min_size=1, max_size=9))
    def accept_some(self, data: st.DataObject, tree: list[int]) -> None:
        table, held = self.pick(data)
        if table.count_missing_blocks(len(held) + len(tree)) > self.pool.num_free:
            return
        write(table, self.memory, tree)
        kept = sorted(data.draw(st.sets(st.integers(0, len(tree) - 1))))
        table.accept(kept)
        held += [tree[offset] for offset in kept]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, held = self.pick(data)
        self.tables.append((table.fork(), list(held)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table, held = self.pick(data)
        table.publish(held)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        table, held = self.pick(data)
        length = data.draw(st.integers(0, len(held)))
        table.trim(length)
        del held[length:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table, _ = self.tables.pop(index)
        table.free()

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity([table.block_ids for table, _ in self.tables])

    @invariant()
    def contents_are_right(self) -> None:
        for table, held in self.tables:
            assert read(table, self.memory) == held

    def teardown(self) -> None:
        for table, _ in self.tables:
            table.free()
        assert self.pool.num_free == 24


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTableMachine = TableMachine.TestCase
