"""The block pool: consecutive runs, prefixes, what is forgotten first."""

from __future__ import annotations

import pytest
from specrag_inference.cache.block_pool import (
    BlockPool,
    OutOfBlocksError,
    compute_root_hash,
    extend_hash_chain,
)


def test_allocation_is_consecutive_and_continues_behind_the_last_block() -> None:
    pool = BlockPool(32)
    first = pool.allocate(5, headroom=4)
    grown = pool.allocate(3, after=first[-1], headroom=4)
    assert first + grown == list(range(first[0], first[0] + 8))


def test_two_sequences_growing_in_turn_both_stay_consecutive_within_their_headroom() -> None:
    pool = BlockPool(64)
    tables = [pool.allocate(6, headroom=8), pool.allocate(6, headroom=8)]
    for _ in range(8):
        for table in tables:
            table.extend(pool.allocate(1, after=table[-1], headroom=8))
    for table in tables:
        assert table == list(range(table[0], table[0] + 14))


def test_scattered_blocks_are_handed_out_when_no_run_is_left() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(8)
    pool.free(blocks[::2])
    assert pool.allocate(4) == blocks[::2]


def test_asking_for_more_than_is_free_raises_and_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="num_blocks=3 exceeds num_free=2"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity()


def test_cached_prefix_is_found_until_its_block_is_reused() -> None:
    pool = BlockPool(4)
    hashes = extend_hash_chain(b"root", range(6), 2)
    blocks = pool.allocate(3)
    for block_id, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block_id, block_hash)
    pool.free(blocks)
    assert pool.lookup(hashes) == blocks
    assert pool.num_cached == 3
    taken = pool.allocate(2)
    assert pool.lookup(hashes) == [block for block in blocks if block not in taken]
    pool.check_integrity([taken])


def test_a_prefix_is_forgotten_from_its_end() -> None:
    pool = BlockPool(3)
    hashes = extend_hash_chain(b"root", range(6), 2)
    blocks = pool.allocate(3)
    for block_id, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block_id, block_hash)
    pool.free(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.lookup(hashes) == blocks[:2]


def test_least_recently_used_prefix_is_forgotten_first() -> None:
    pool = BlockPool(4)
    chains = [extend_hash_chain(root, range(4), 2) for root in (b"old", b"new")]
    owned = []
    for chain in chains:
        blocks = pool.allocate(2)
        for block_id, block_hash in zip(blocks, chain, strict=True):
            pool.publish(block_id, block_hash)
        owned.append(blocks)
    pool.free(owned[0])
    pool.free(owned[1])
    pool.allocate(2)
    assert pool.lookup(chains[0]) == []
    assert pool.lookup(chains[1]) == owned[1]


def test_hash_chains_differ_by_scope_model_and_every_earlier_token() -> None:
    roots = {
        compute_root_hash(cache_scope=scope, model_fingerprint=model)
        for scope in (b"", b"a", b"b")
        for model in ("", "m")
    }
    assert len(roots) == 6
    one = extend_hash_chain(b"root", [1, 2, 3, 4], 2)
    two = extend_hash_chain(b"root", [9, 2, 3, 4], 2)
    assert not set(one) & set(two)
    assert extend_hash_chain(one[0], [3, 4], 2) == one[1:]


def test_integrity_check_catches_a_lost_reference_and_a_stale_hash() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="references"):
        pool.check_integrity([blocks[:1]])
    pool.publish(blocks[0], b"hash")
    pool._by_hash[b"other"] = blocks[1]
    with pytest.raises(AssertionError, match="stale"):
        pool.check_integrity([blocks])


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
