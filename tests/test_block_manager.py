"Paged memory: who owns which block, and which blocks are found again"
import random
import time
from collections import deque
from itertools import count

import pytest
from host_rig import HostEngine, check_index, check_pool

from minivllm.engine.block_manager import NO_PARENT, Block, BlockManager, compute_hash
from minivllm.engine.sequence import Sequence
from minivllm.sampling_params import SamplingParams

ids = count()


def sequence(token_ids, block_size=4):
    return Sequence(next(ids), list(token_ids), SamplingParams(), block_size)


def compute(manager, seq, n=None):
    "What a step does to `n` tokens, all by default: they have slots, and then they are computed"
    before = seq.num_computed_tokens
    end = seq.num_tokens if n is None else before + n
    manager.append(seq, end)
    seq.num_computed_tokens = end
    manager.cache_full_blocks(seq, before)


def admit(manager, seq):  # the tokens found in the cache
    "Give a new sequence its blocks"
    hits = manager.lookup(seq)
    assert manager.can_allocate(seq, hits)
    manager.allocate_with_cache(seq, hits)
    return len(hits) * manager.block_size


def run(manager, token_ids):
    "A whole sequence: admitted and computed"
    seq = sequence(token_ids, manager.block_size)
    admit(manager, seq)
    compute(manager, seq)
    return seq


def recycle(manager, block_ids):
    "Make certain free blocks the next to be taken, and take them"
    for block_id in block_ids: manager.free_block_ids.move_to_end(block_id, last=False)
    taken = sequence([0] * manager.block_size * len(block_ids), manager.block_size)
    manager.append(taken, taken.num_tokens)
    assert sorted(taken.block_table) == sorted(block_ids)
    return taken


# the hash

def test_hash_depends_on_tokens_order_and_prefix():
    root = compute_hash([1, 2, 3, 4])
    assert root == compute_hash([1, 2, 3, 4], NO_PARENT)
    others = [compute_hash(t, p) for t, p in (([4, 3, 2, 1], 0), ([1, 2, 3], 0), ([1, 2, 3, 4], root), ([1, 2, 3, 4], 2**64 - 1))]
    assert len({root, *others}) == 5
    assert compute_hash([2**40, 0]) != compute_hash([0, 2**40])


def test_hash_is_computed_once_for_each_block(monkeypatch):
    calls = []
    monkeypatch.setattr("minivllm.engine.block_manager.compute_hash", lambda t, p: calls.append(t) or compute_hash(t, p))
    manager, seq = BlockManager(8, 4), sequence(range(12))
    for _ in range(3): manager.lookup(seq)
    assert len(calls) == 1, "after the first miss nothing needs to be hashed"
    admit(manager, seq)
    compute(manager, seq)
    for token_id in range(8):
        seq.append_token(token_id)
        compute(manager, seq)
    assert len(calls) == 5
    manager.deallocate(seq)
    assert len(manager.lookup(seq)) == 4 and len(calls) == 5


# memory

def test_block_reset_gives_one_owner_and_no_content():
    block = Block(3, 0, 5, [1], 6, 7)
    block.reset()
    assert (block.block_id, block.ref_count) == (3, 1)
    assert block.hash is block.token_ids is block.content_id is block.parent_id is None


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_new_block_is_taken_exactly_when_a_token_has_no_slot(block_size):  # F22
    for prompt in range(1, 3 * block_size + 2):
        manager, seq = BlockManager(16, block_size, False), sequence(range(prompt), block_size)
        admit(manager, seq)
        compute(manager, seq)
        for _ in range(2 * block_size):
            held = len(seq.block_table)
            seq.append_token(0)
            assert len(seq.block_table) == held, "the sampled token alone needs no slot"
            compute(manager, seq)
            took = len(seq.block_table) - held
            assert took == ((seq.num_tokens - 1) % block_size == 0) == (seq.last_block_num_tokens == 1)
            assert len(seq.block_table) == seq.num_blocks
        check_pool(manager, [seq])


def test_can_append_asks_for_missing_blocks_only():
    manager = BlockManager(2, 4)
    seq = run(manager, range(4))
    assert manager.can_append(seq, 4) and manager.can_append(seq, 8) and not manager.can_append(seq, 9)
    manager.append(seq, 8)
    assert manager.can_append(seq, 8) and not manager.can_append(seq, 9)
    assert list(seq.block_table) == [0, 1]


def test_can_allocate_counts_free_hits_as_taken():
    manager = BlockManager(4, 4)
    first = run(manager, range(8))
    second = sequence([*range(8), *range(20, 29)])  # 5 blocks, 2 of them found
    assert not manager.can_allocate(second, [])
    assert not manager.can_allocate(second, manager.lookup(second))
    third = sequence([*range(8), *range(20, 28)])  # 4 blocks: 2 shared with `first`, 2 free ones
    assert manager.can_allocate(third, manager.lookup(third))
    manager.deallocate(first)
    assert manager.can_allocate(third, manager.lookup(third)), "2 hits out of the free list and 2 others: all 4"
    blocker = recycle(manager, [3])
    assert not manager.can_allocate(third, manager.lookup(third)), "hits that nobody holds are part of the 3 free blocks"
    assert manager.can_allocate(sequence(range(12)), manager.lookup(sequence(range(12))))
    manager.deallocate(blocker)


def test_shared_block_is_free_after_its_last_owner():
    manager = BlockManager(6, 4)
    a, b = run(manager, range(10)), run(manager, [*range(8), 50])
    assert list(b.block_table[:2]) == list(a.block_table[:2]) and b.block_table[2] != a.block_table[2]
    assert [manager.blocks[i].ref_count for i in a.block_table] == [2, 2, 1]
    manager.deallocate(a)
    check_pool(manager, [b])
    assert manager.num_free_blocks == 3
    manager.deallocate(b)
    assert manager.num_free_blocks == 6 and all(block.ref_count == 0 for block in manager.blocks)
    assert list(a.block_table) == [] and a.num_computed_tokens == 0


# finding

def test_recycled_block_is_not_found_by_its_old_content():  # F01
    manager = BlockManager(4, 4)
    a = run(manager, range(8))
    a_hashes = list(a.block_hashes)
    manager.deallocate(a)
    manager.deallocate(run(manager, range(100, 116)))
    assert manager.lookup(sequence([*range(8), 50])) == []
    assert not set(a_hashes) & set(manager.hash_to_blocks)
    check_index(manager)


def test_recycling_a_twin_leaves_the_other_one_findable():  # F01: only its own entry
    manager = BlockManager(8, 4)
    a, b = sequence(range(8)), sequence(range(8))
    for seq in a, b: admit(manager, seq)
    for seq in a, b: compute(manager, seq)
    for gone, kept in (a, b), (b, a):
        table = list(gone.block_table)
        manager.deallocate(gone)
        taken = recycle(manager, table)
        assert manager.lookup(sequence([*range(8), 1])) == list(kept.block_table)
        check_index(manager)
        manager.deallocate(taken)
        gone.block_table, gone.num_computed_tokens = gone.block_table[:0], 0
        manager.append(gone, 8)
        compute(manager, gone)


def test_continuation_behind_a_twin_outlives_the_indexed_root():
    "The root that was computed first goes; its twin still leads to what was computed behind it"
    manager = BlockManager(8, 4)
    a, b = sequence(range(4)), sequence(range(8))
    for seq in a, b: admit(manager, seq)
    for seq in a, b: compute(manager, seq)
    root = a.block_table[0]
    manager.deallocate(a)
    recycle(manager, [root])
    assert manager.lookup(sequence(range(9))) == list(b.block_table)


def test_hit_leaves_one_token_to_compute():  # F04
    for length in 1, 3, 4, 5, 8, 12, 13, 16:
        manager = BlockManager(8, 4)
        manager.deallocate(run(manager, range(10, 10 + length)))
        assert admit(manager, sequence(range(10, 10 + length))) == (length - 1) // 4 * 4


def test_partial_block_is_never_indexed():  # F05
    engine = HostEngine(model=lambda value: 9)
    engine.generate([1, 2, 3, 4, 5, 6])
    assert engine.generate([1, 2, 3, 4, 5, 6, 7]).num_cached_tokens == 4
    assert engine.generate([5, 6, 1, 1]).num_cached_tokens == 0
    engine = HostEngine(model=lambda value: 9)
    again, sizes = engine.add([1, 2, 3, 4, 5, 6], max_tokens=3), []
    while engine.scheduler.has_unfinished():
        engine.step()
        sizes.append((again.num_tokens, len(engine.manager.hash_to_blocks)))
    assert sizes == [(7, 1), (8, 1), (9, 2)], "indexed when position 7 is computed, not when its token is known"


def test_nothing_is_found_before_it_is_computed():
    manager, a = BlockManager(8, 4), sequence(range(12))
    admit(manager, a)
    assert manager.lookup(sequence(range(12))) == []
    for n, found in (3, 0), (1, 1), (6, 2), (2, 2):
        compute(manager, a, n)
        assert len(manager.lookup(sequence([*range(12), 1]))) == (a.num_computed_tokens // 4)
    assert found == 2


def test_same_tokens_in_another_context_are_a_miss():
    manager = BlockManager(8, 4)
    manager.deallocate(run(manager, [1, 1, 1, 1, 5, 6, 7, 8]))
    assert manager.lookup(sequence([2, 2, 2, 2, 5, 6, 7, 8, 9])) == []
    assert manager.lookup(sequence([5, 6, 7, 8, 9])) == []
    assert len(manager.lookup(sequence([1, 1, 1, 1, 5, 6, 7, 8, 9]))) == 2


def test_match_stops_at_the_first_miss():  # F08
    manager = BlockManager(8, 4)
    a = run(manager, range(12))
    root = a.block_table[0]
    manager.deallocate(a)
    recycle(manager, [root])
    assert admit(manager, sequence([*range(12), 60])) == 0


class Colliding(BlockManager):
    "Every block has the same hash"
    def block_hash(self, seq, i): return 5


def test_colliding_hash_is_checked_by_tokens_and_parent():
    manager = Colliding(16, 4)
    texts = [1, 1, 1, 1, 5, 6, 7, 8], [2, 2, 2, 2, 5, 6, 7, 8], [3, 3, 3, 3]
    tables = [list(run(manager, text).block_table) for text in texts]
    for text, table in zip(texts, tables): assert manager.lookup(sequence([*text, 0])) == table
    assert manager.lookup(sequence([3, 3, 3, 3, 5, 6, 7, 8, 9])) == tables[2], "known tokens behind another parent"
    assert manager.lookup(sequence([5, 6, 7, 8, 9])) == []
    check_index(manager)


def test_caching_can_be_switched_off():
    manager = BlockManager(8, 4, enable_prefix_caching=False)
    seq = run(manager, range(8))
    manager.deallocate(seq)
    assert manager.lookup(sequence(range(9))) == [] and not manager.hash_to_blocks and not seq.block_hashes


# sharing and recycling

def test_duplicates_keep_their_own_blocks():  # F11
    engine = HostEngine(block_size=2, num_blocks=16, model=lambda value: 7)
    a, b = engine.add(range(11, 17), max_tokens=4), engine.add(range(11, 17), max_tokens=4)
    engine.step()
    live = {*a.block_table, *b.block_table}
    assert len(live) == 6 and not live & set(engine.manager.free_block_ids)
    before = [list(a.block_table), list(b.block_table)]
    c = engine.add(range(50, 60), max_tokens=1)
    engine.scheduler.max_num_seqs = 3
    step = engine.scheduler.schedule()
    assert c in step.seqs and not set(c.block_table) & {*a.block_table, *b.block_table}
    assert [list(a.block_table[:3]), list(b.block_table[:3])] == before, "a table only ever grows"
    engine.scheduler.postprocess(step, engine.runner.run(step.seqs, step.num_tokens))
    engine.run()
    assert a.output_token_ids == b.output_token_ids == [7] * 4


def test_freed_blocks_are_recycled_least_recently_used_first_tail_before_root():
    manager = BlockManager(6, 4)
    a, b = run(manager, range(12)), run(manager, range(50, 62))
    manager.deallocate(b)
    manager.deallocate(a)
    assert list(manager.free_block_ids) == [*reversed([3, 4, 5]), *reversed([0, 1, 2])]


def test_eviction_takes_the_tail_of_a_prefix_first():  # F13
    engine = HostEngine(num_blocks=8)
    a = engine.add(range(13))
    engine.step()
    engine.add(range(200, 220), max_tokens=9)
    engine.step()
    assert len(engine.manager.lookup(sequence(range(13)))) == 3
    lost = []
    while engine.manager.free_block_ids:
        recycle(engine.manager, [next(iter(engine.manager.free_block_ids))])
        lost.append(len(engine.manager.lookup(sequence(range(13)))))
    assert a.is_finished and lost == [2, 1, 0]


def test_generated_tokens_are_found_in_the_next_turn():  # F14
    engine = HostEngine(model=lambda value: 9)
    a = engine.generate([1, 2, 3, 4, 5], max_tokens=8)
    assert a.num_tokens == 13
    assert engine.generate([*a.token_ids, 1, 1]).num_cached_tokens == 12


def test_ten_blocks_as_in_the_design_page_of_vllm():
    "Request 0 with 15 tokens, request 1 sharing 10 of its 14, request 2 sharing 12 of its 29"
    manager = BlockManager(10, 4)
    r0 = run(manager, range(15))
    assert list(r0.block_table) == [0, 1, 2, 3] and manager.blocks[3].hash is None
    for token_id in (15, 16):
        r0.append_token(token_id)
        compute(manager, r0)
    assert list(r0.block_table) == [0, 1, 2, 3, 4] and manager.blocks[3].hash is not None
    r1 = sequence([*range(10), 100, 101, 102, 103])
    assert admit(manager, r1) == 8 and list(r1.block_table) == [0, 1, 5, 6]
    assert [manager.blocks[i].ref_count for i in (0, 1, 2)] == [2, 2, 1]
    compute(manager, r1)
    manager.deallocate(r0)
    assert list(manager.free_block_ids) == [7, 8, 9, 4, 3, 2]
    assert manager.blocks[2].hash is not None and manager.blocks[3].hash is not None
    manager.deallocate(r1)
    assert list(manager.free_block_ids) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    r2 = sequence([*range(12), *range(200, 217)])
    assert admit(manager, r2) == 12 and list(r2.block_table) == [0, 1, 2, 7, 8, 9, 4, 3]
    assert list(manager.free_block_ids) == [6, 5]
    assert manager.blocks[3].hash is None, "evicted"
    assert manager.lookup(sequence(range(17))) == [0, 1, 2]
    check_pool(manager, [r2])
    check_index(manager)


# cost

def seconds(function, repeat=7):
    def once():
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    return min(once() for _ in range(repeat))


def test_taking_cached_blocks_out_of_a_large_pool_costs_no_more_than_finding_them():  # F12
    manager = BlockManager(100_000, 16)
    manager.deallocate(run(manager, range(32_768)))
    lookups, takes = [], []
    for _ in range(7):
        seq = sequence(range(32_768), 16)
        start = time.perf_counter()
        hits = manager.lookup(seq)
        middle = time.perf_counter()
        manager.allocate_with_cache(seq, hits)
        takes.append(time.perf_counter() - middle)
        lookups.append(middle - start)
        assert len(hits) == 2047
        manager.deallocate(seq)
    assert min(takes) < 5 * min(lookups)


def test_random_pool_operations_keep_the_pool_sound():
    rng, manager, live = random.Random(0), BlockManager(12, 3), deque()
    for _ in range(3000):
        if live and rng.random() < 0.45:
            live.rotate(rng.randrange(len(live)))
            manager.deallocate(live.pop())
        else:
            seq = sequence([rng.randrange(2) for _ in range(rng.randrange(1, 13))], 3)
            hits = manager.lookup(seq)
            assert [t for i in hits for t in manager.blocks[i].token_ids] == seq.token_ids[: 3 * len(hits)]
            if manager.can_allocate(seq, hits):
                manager.allocate_with_cache(seq, hits)
                compute(manager, seq)
                live.append(seq)
        check_pool(manager, live)
        check_index(manager)
