"A request's life: its tokens, its counters, its blocks"
import subprocess
import sys

import pytest

from minivllm.engine.sequence import UNKNOWN, Sequence, SequenceStatus
from minivllm.sampling_params import SamplingParams


def sequence(token_ids, block_size=4, max_tokens=16, **options):
    return Sequence(0, token_ids, SamplingParams(max_tokens=max_tokens), block_size, **options)


def test_prompt_is_copied():
    prompt = [1, 2, 3]
    first, second = sequence(prompt), sequence(prompt)
    first.append_token(4)
    assert prompt == second.token_ids == [1, 2, 3] and first.token_ids == [1, 2, 3, 4]
    prompt.append(9)
    assert second.token_ids == [1, 2, 3] and second.num_tokens == second.num_prompt_tokens == 3


def test_empty_prompt_is_refused():  # F66
    with pytest.raises(ValueError, match="prompt is empty"): sequence([])


def test_new_sequence_waits_with_nothing_computed():
    seq = sequence([5, 6], stop_token_ids=frozenset({2}), seed=3)
    assert seq.status is SequenceStatus.WAITING and not seq.is_finished and seq.finish_reason is None
    assert seq.num_computed_tokens == seq.num_cached_tokens == seq.num_output_tokens == 0
    assert seq.num_uncomputed_tokens == 2 and list(seq.block_table) == [] and seq.output_token_ids == []
    assert seq.max_num_tokens == 18 and seq.stop_token_ids == {2} and seq.seed == 3


def test_sampled_token_is_known_before_it_is_computed():
    seq = sequence([5, 6, 7])
    seq.num_computed_tokens = 3
    seq.append_token(8)
    assert (seq.num_tokens, len(seq), seq.num_computed_tokens, seq.num_uncomputed_tokens) == (4, 4, 3, 1)
    assert seq.num_prompt_tokens == 3 and seq.output_token_ids == [8] and seq.num_output_tokens == 1


def test_unknown_tokens_count_for_the_engine_and_not_for_the_user():
    seq = sequence([5, 6, 7])
    seq.append_token(8)
    for _ in range(2): seq.append_unknown_token()
    assert (seq.num_tokens, seq.num_unknown_tokens, seq.first_unknown) == (6, 2, 4) and seq.token_ids[4:] == [UNKNOWN] * 2
    assert seq.output_token_ids == [8] and seq.num_output_tokens == 1 and seq.num_blocks == 2
    seq.set_unknown_token(9)
    assert seq.output_token_ids == [8, 9] and (seq.num_unknown_tokens, seq.first_unknown, seq.num_tokens) == (1, 5, 6)
    seq.drop_unknown_tokens()
    assert seq.token_ids == [5, 6, 7, 8, 9] and seq.num_unknown_tokens == 0 and seq.first_unknown == 5
    seq.drop_unknown_tokens()
    assert seq.output_token_ids == [8, 9]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_blocks_partition_the_tokens(block_size):  # F22
    for length in range(1, 40):
        token_ids = list(range(100, 100 + length))
        seq = sequence(token_ids, block_size)
        blocks = [seq.block(i) for i in range(seq.num_blocks)]
        assert sum(blocks, []) == token_ids
        assert all(len(block) == block_size for block in blocks[:-1]) and 1 <= len(blocks[-1]) <= block_size
        assert seq.last_block_num_tokens == len(blocks[-1])


def test_full_last_block_has_block_size_tokens():  # F22
    seq = sequence(list(range(8)))
    assert seq.num_blocks == 2 and seq.last_block_num_tokens == 4 and seq.block(1) == [4, 5, 6, 7]


@pytest.mark.parametrize("i", [-1, 2, 3])
def test_block_outside_the_sequence_is_an_error(i):
    with pytest.raises(IndexError, match=f"block {i} of a sequence with 2 blocks"): sequence(list(range(8))).block(i)


def test_finish_keeps_the_reason():
    seq = sequence([1])
    seq.finish("stop", 7)
    assert seq.is_finished and (seq.finish_reason, seq.stop_reason) == ("stop", 7)
    assert "FINISHED" in repr(seq)


@pytest.mark.parametrize("module", ["sequence", "block_manager", "scheduler"])
def test_module_does_not_import_torch(module):
    code = f"import sys, minivllm.engine.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
