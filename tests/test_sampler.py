"From logits to tokens: distribution, filters, random bits, independence, unusable rows"

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import minivllm.layers.sampler as sampler
from minivllm.kernels.common import tl, triton
from minivllm.layers.sampler import (
    FIRST_CANDIDATES,
    MASK32,
    Sampler,
    adjust_logits,
    exponential_noise,
    keep_prefix,
    most_likely,
    noise_of,
    philox,
    quad_noise,
    race,
    sample,
    sample_torch,
    sample_triton,
    top_logprobs,
)
from paging import KERNEL_DEVICES

FOUR = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def rows(count, **values):
    "One value per row, repeated"
    return {name: torch.full((count,), value) for name, value in values.items()}


def draws(logits, count, temperature=1.0, seed=0, **filters):
    "`count` draws from the same logits, at positions 0, 1, 2, ..."
    ids = []
    for positions in torch.arange(count).split(max(1, 2**21 // len(logits))):
        n = len(positions)
        ids.append(
            sample_torch(
                logits.expand(n, -1),
                positions=positions,
                **rows(n, temperature=temperature, seeds=seed, **filters),
            )
        )
    return torch.cat(ids)


def p_value(ids, probs):
    "Chi-square: how probable a correct sampler deviates at least this far"
    expected = len(ids) * probs.double()
    chi_square = ((torch.bincount(ids, minlength=len(probs)) - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(
        torch.tensor((len(probs) - 1) / 2).double(), chi_square / 2
    ).item()


# --- random bits

KNOWN = [  # Random123's known answers for philox4x32-10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK32,) * 4, (MASK32, MASK32), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, answer", KNOWN)
def test_philox_known_answers(counter, key, answer):
    assert (
        tuple(map(int, philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])))
        == answer
    )


def test_philox_leaves_its_arguments_alone():
    counter, key = (
        [torch.randint(0, 2**32, (5, 3)) for _ in range(4)],
        [torch.randint(0, 2**32, (5, 1)) for _ in range(2)],
    )
    before = [x.clone() for x in (*counter, *key)]
    philox(counter, key)
    assert all(torch.equal(x, y) for x, y in zip((*counter, *key), before))


@triton.jit
def bits_kernel(ours_ptr, tritons_ptr, picked_ptr, seed_ptr, position_ptr, choice_ptr, N: tl.constexpr):
    "One row of random words: `quad_bits` in order, `tl.philox`, and `bits_of` id by id"
    row, quads, ids = tl.program_id(0), tl.arange(0, N), tl.arange(0, 4 * N)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row).to(tl.int32)
    choice = tl.load(choice_ptr + row).to(tl.int32)
    out = row * 4 * N + ids
    tl.store(ours_ptr + out, sampler.bits_in_order(quads, seed, position, choice, N).to(tl.int64))
    tl.store(picked_ptr + out, sampler.bits_of(ids, seed, position, choice).to(tl.int64))
    words = tl.philox(seed, quads, position, choice, 0)
    for i in tl.static_range(4):
        tl.store(tritons_ptr + row * 4 * N + quads * 4 + i, words[i].to(tl.int64))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_bits_are_tritons_and_the_kernels(device):
    "Torch twin, kernels and `tl.philox(seed, id // 4, position, choice, 0)` have the same bits, compiled or interpreted"
    seeds = torch.tensor([0, 1, 2**31, 2**32 + 5, 2**63 - 1], device=device)
    positions = torch.tensor([0, 1, 4095, 2**20, 2**31 - 1], device=device)
    choices = torch.tensor([0, 1, 2, 0, 7], device=device)
    out = [torch.zeros(5, 64, dtype=torch.int64, device=device) for _ in range(3)]
    bits_kernel[(5,)](*out, seeds, positions, choices, 16)
    column = lambda x: x.unsqueeze(1)
    words = philox(
        (torch.arange(16, device=device), column(positions), column(choices), torch.tensor(0, device=device)),
        (column(seeds & MASK32), column(seeds >> 32)),
    )
    twin = torch.stack(words, dim=-1).flatten(1)
    for name, bits in zip(("in order", "tl.philox", "picked"), out):
        assert torch.equal(bits, twin), name


@triton.jit
def noise_kernel(bits_ptr, out_ptr, N: tl.constexpr):
    ids = tl.arange(0, N)
    tl.store(out_ptr + ids, sampler.exponential(tl.load(bits_ptr + ids).to(tl.uint32)))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_kernel_noise_is_the_exact_exponential(device):
    "-log(1 - u) to a few units in the last place, over all 32 bits, and never 0 or infinite"
    edges = torch.tensor([0, 1, 2, 2**24, 2**31 - 2**8, 2**31 - 1, 2**31, MASK32 - 2**8, MASK32 - 1, MASK32])
    random = torch.randint(0, 2**32, (4096 - 10 - 2000,)) >> torch.randint(0, 24, (4096 - 10 - 2000,))
    bits = torch.cat([edges, random, torch.randint(2**31 - 10**6, 2**31 + 10**6, (2000,))]).to(device)
    out = torch.empty(4096, device=device)
    noise_kernel[(1,)](bits, out, 4096)
    u = ((bits.float() + 0.5) * 2**-32).clamp(max=1 - 2**-24)
    torch.testing.assert_close(out.double(), -torch.log1p(-u.double()), rtol=1e-6, atol=0)


# --- exponential noise


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(0, 5),
    st.integers(1, 600),
    st.data(),
)
@settings(max_examples=50, deadline=None)
def test_noise_of_some_ids_is_that_of_all(seed, position, choice, vocab_size, data):
    seeds, positions = torch.tensor([seed, 3]), torch.tensor([position, 4])
    everything = exponential_noise(seeds, positions, vocab_size, choice)
    ids = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(0, vocab_size - 1), min_size=9, max_size=9),
                min_size=2,
                max_size=2,
            )
        )
    )
    assert everything.shape == (2, vocab_size)
    assert torch.equal(noise_of(seeds, positions, ids, choice), everything.gather(1, ids))
    assert torch.equal(
        exponential_noise(seeds[:1], positions[:1], vocab_size + 13, choice)[:, :vocab_size],
        everything[:1],
    )


def test_noise_depends_on_each_argument():
    one = torch.tensor([1])
    first = exponential_noise(one, one, 1000)
    for other in (
        exponential_noise(one + 1, one, 1000),
        exponential_noise(one + 2**32, one, 1000),
        exponential_noise(one, one + 1, 1000),
        exponential_noise(one, one, 1000, choice=1),
    ):
        assert (first == other).float().mean() < 0.01
    both = exponential_noise(
        torch.tensor([1, 1]), torch.tensor([1, 1]), 1000, choice=torch.tensor([0, 1])
    )
    assert torch.equal(both[:1], first) and torch.equal(
        both[1:], exponential_noise(one, one, 1000, choice=1)
    )


def test_noise_never_reaches_its_ends(monkeypatch):
    "Whatever the bits are, the exponential is above 0 and finite, and its logarithm too"
    import minivllm.layers.sampler as sampler

    for bits in (0, 1, 2**24, 2**31, MASK32 - 1, MASK32):
        monkeypatch.setattr(sampler, "philox", lambda counter, key: (torch.full((1, 1), bits),) * 4)
        noise = sampler.quad_noise(torch.tensor([0]), torch.tensor([0]), torch.tensor([0]))
        assert (noise > 0).all() and noise.isfinite().all() and noise.log().isfinite().all()
        u = (bits + 0.5) / 2**32
        if bits < 2**24:
            torch.testing.assert_close(
                noise[0, 0, 0].double().item(), -math.log1p(-u), rtol=1e-6, atol=0
            )


def test_noise_is_exponential():
    "Kolmogorov-Smirnov: a correct generator exceeds the limit once in a thousand trials"
    line, zero = torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64)
    for x in (
        exponential_noise(zero[:1], zero[:1], 40_000),
        exponential_noise(zero, line, 1),
        exponential_noise(line, zero, 1),
    ):
        x = x.flatten().double().sort().values
        steps, expected = torch.arange(40_001).double() / 40_000, 1 - torch.exp(-x)
        assert (
            torch.maximum((expected - steps[:-1]).abs(), (expected - steps[1:]).abs()).max()
            < 1.95 / 200
        )


# --- the distribution


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_race_draws_from_the_softmax(seed):
    assert p_value(draws(FOUR, 40_000, seed=seed), FOUR.exp()) > 1e-3
    assert p_value(draws(FOUR, 40_000, seed=seed, temperature=0.5), (2 * FOUR).softmax(-1)) > 1e-3
    logits = torch.linspace(0, 3, 30)
    assert p_value(draws(logits, 40_000, seed=seed), logits.softmax(-1)) > 1e-3


def test_flat_vocabulary_favours_no_id():
    ids = draws(torch.zeros(50_000), 1000)
    assert p_value(ids // 5000, torch.full((10,), 0.1)) > 1e-3
    assert p_value(ids % 4, torch.full((4,), 0.25)) > 1e-3


@pytest.mark.parametrize("vocab_size, temperature", [(255, 1.0), (257, 1.0), (800, 1.5)])
def test_two_races_draw_from_the_softmax(vocab_size, temperature):
    "Blocks of 256 ids, the last one short: a correct sampler fails once in a thousand trials, for each seed"
    logits = 1.5 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[::7] = -torch.inf
    possible = logits.isfinite()
    for seed in (0, 2**33):
        ids = draws(logits, 30_000, seed=seed, temperature=temperature)
        assert possible[ids].all()
        place = possible.cumsum(0) - 1
        assert p_value(place[ids], (logits[possible] / temperature).softmax(-1)) > 1e-3


def test_the_races_are_independent(monkeypatch):
    "With the same numbers in both, the place within the block depends on whether the block won"
    logits = torch.randn(800, generator=torch.Generator().manual_seed(1))
    logits[:4] += 4  # the ids that would share their numbers with the blocks
    assert 4 * sampler.FIRST_QUAD >= 2**31  # behind every id
    assert p_value(draws(logits, 30_000), logits.softmax(-1)) > 1e-3
    monkeypatch.setattr(sampler, "FIRST_QUAD", 0)
    assert p_value(draws(logits, 30_000), logits.softmax(-1)) < 1e-9


def test_blocks_are_drawn_by_their_mass():
    "A whole vocabulary: how often each tenth of its blocks is drawn, and each quarter of a block"
    logits = torch.randn(151_936, generator=torch.Generator().manual_seed(3))
    logits += torch.linspace(0, 2, len(logits))
    probs, ids = logits.double().softmax(-1), draws(logits, 2000)
    for groups, count in ((torch.arange(len(logits)) // 15_200, 10), (torch.arange(len(logits)) % 256 // 64, 4)):
        expected = torch.zeros(count, dtype=torch.double).index_add(0, groups, probs)
        assert p_value(groups[ids], expected) > 1e-3


def test_greedy_and_drawn_rows_share_a_batch():  # F29
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    ids = torch.stack(
        [
            sample_torch(
                logits, torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), torch.tensor([t, t])
            )
            for t in range(200)
        ]
    )
    assert set(ids[:, 0].tolist()) == {1} and set(ids[:, 1].tolist()) == {0, 1, 2}


def test_greedy_takes_the_lower_of_equal_ids():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert sample_torch(logits, **rows(1, temperature=0.0, seeds=0, positions=0)).tolist() == [1]
    assert sample_torch(
        logits, **rows(1, temperature=1.0, seeds=0, positions=0, top_k=1)
    ).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 3.4e38])
def test_extreme_temperatures(temperature):  # F29
    for order in ([0, 1, 2], [2, 1, 0]):
        ids = draws(torch.tensor([3e4, 2.9e4, -torch.inf])[order], 50, temperature=temperature)
        best, second = order.index(0), order.index(1)
        assert set(ids.tolist()) == ({best} if temperature < 1 else {best, second})


# --- filters


def kept(top_k=0, top_p=1.0, min_p=0.0, temperature=1.0, logits=FOUR):
    "Ids that are ever drawn"
    return set(
        draws(logits, 2000, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).tolist()
    )


@pytest.mark.parametrize(
    "options, ids",
    [
        (dict(top_p=0.6), {3, 2}),
        (dict(top_p=0.39), {3}),
        (dict(top_p=0.05), {3}),
        (dict(top_p=1e-60), {3}),
        (dict(top_p=1.0), {0, 1, 2, 3}),
        (dict(temperature=0.5, top_p=0.5), {3}),
        (dict(top_k=2), {3, 2}),
        (dict(top_k=0), {0, 1, 2, 3}),
        (dict(top_k=-1), {0, 1, 2, 3}),
        (dict(top_k=1), {3}),
        (dict(top_k=4), {0, 1, 2, 3}),
        (dict(top_k=99), {0, 1, 2, 3}),
        (dict(min_p=0.3), {1, 2, 3}),
        (dict(min_p=1.0), {3}),
        (dict(top_k=2, top_p=0.5), {3}),
        (dict(top_k=2, top_p=0.6), {3, 2}),
        (dict(min_p=0.7, top_p=0.57), {3}),
        (dict(min_p=0.7, top_k=3), {3, 2}),
    ],
)
def test_filters_keep(options, ids):  # F30
    assert kept(**options) == ids


def test_top_p_share():  # F30
    ids = draws(FOUR, 10_000, top_p=0.6)
    assert set(ids.tolist()) == {2, 3} and abs((ids == 3).float().mean().item() - 4 / 7) < 0.02


def test_each_filter_may_come_alone():
    for options in (dict(top_k=2), dict(top_p=0.6), dict(min_p=0.7)):
        assert set(draws(FOUR, 500, **options).tolist()) == {2, 3}
        full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
        assert torch.equal(draws(FOUR, 500, **options), draws(FOUR, 500, **full))


def reference_kept(scaled, top_k, top_p, min_p):
    "Ids that the filters keep of one row, in float64 and in Python; None if the decision is too close to call"
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    weight = {i: math.exp(scaled[i]) for i in order}
    order = [i for i in order if scaled[i] >= (math.log(min_p) if min_p else -math.inf)]
    order = order[:top_k] if top_k > 0 else order
    total, before, ids = sum(weight[i] for i in order), 0.0, set()
    if top_p >= 1:
        return set(order)
    for i in order:
        if abs(before - top_p * total) < 1e-6 * total:
            return None
        if before < top_p * total or not ids:
            ids.add(i)
        before += weight[i]
    return ids


def reference_draw(scaled, seeds, positions, size=256):
    "Two races in float64, row by row: among the blocks' masses, then within the block"
    ids = []
    for row, seed, position in zip(scaled.double(), seeds.view(-1, 1), positions.view(-1, 1)):
        masses = torch.stack([block.exp().sum() for block in row.split(size)])
        quads = torch.arange(-(-len(masses) // 4))
        noise = quad_noise(seed, position, 2**30 + quads).flatten()[: len(masses)].double()
        block = int((masses / noise).argmax())
        place = torch.arange(block * size, min(block * size + size, len(row)))
        ids.append(int(place[(row[place] - noise_of(seed, position, place[None])[0].double().log()).argmax()]))
    return torch.tensor(ids)


PARAMETERS = st.tuples(
    st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5]),  # temperature
    st.integers(0, 2**63 - 1),
    st.integers(0, 10_000),  # seed, position
    st.sampled_from([-1, 0, 1, 2, 5, 63, 64, 65, 200, 10**6]),  # top_k
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1]),  # top_p
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),  # min_p
    st.sampled_from([0.0, 0.5, 3.0, 8.0]),
    st.integers(0, 10**6),
    st.booleans(),  # spread and seed of the logits, coarse or not
)


def make_batch(requests, vocab_size):
    "Arguments of `sample_torch` from drawn parameters"
    logits = []
    for *_, spread, seed, coarse in requests:
        row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
        logits.append(row.bfloat16().float() if coarse else row)
    column = lambda i, dtype: torch.tensor([r[i] for r in requests], dtype=dtype)
    return dict(
        logits=torch.stack(logits),
        temperature=column(0, torch.float32),
        seeds=column(1, torch.int64),
        positions=column(2, torch.int64),
        top_k=column(3, torch.int64),
        top_p=column(4, torch.float32),
        min_p=column(5, torch.float32),
    )


def pick(batch, index):
    return {name: value[index] for name, value in batch.items()}


@given(st.lists(PARAMETERS, min_size=1, max_size=5), st.sampled_from([3, 40, 500, 5000]))
@settings(max_examples=80, deadline=None)
def test_tokens_are_the_references(requests, vocab_size):
    "Rows that ask: the winner of a race among the ids that a plain reference keeps; others: of two races"
    batch = make_batch(requests, vocab_size)
    got = sample_torch(**batch)
    noise = exponential_noise(batch["seeds"], batch["positions"], vocab_size)
    for i, (temperature, _, _, top_k, top_p, min_p, *_) in enumerate(requests):
        logits = batch["logits"][i]
        if temperature == 0:
            assert got[i] == logits.argmax()
            continue
        scaled = (logits - logits.max()) / torch.tensor(temperature)
        if not 0 < top_k < vocab_size and top_p == 1 and min_p == 0:
            assert got[i] == reference_draw(scaled[None], batch["seeds"][i : i + 1], batch["positions"][i : i + 1])
            continue
        ids = reference_kept(scaled.tolist(), top_k, top_p, min_p)
        if ids is not None:
            excluded = torch.ones(vocab_size, dtype=torch.bool).index_fill(
                0, torch.tensor(sorted(ids)), False
            )
            assert (
                got[i] == race(scaled.masked_fill(excluded, -torch.inf)[None], noise[i : i + 1])[0]
            )


# --- independence of the batch


@given(
    st.lists(PARAMETERS, min_size=2, max_size=6),
    st.sampled_from([40, 500, 9000]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=80, deadline=None)
def test_a_row_depends_on_itself_alone(requests, vocab_size, random):  # F32
    batch = make_batch(requests, vocab_size)
    together = sample_torch(**batch)
    for i in range(len(requests)):
        assert sample_torch(**pick(batch, [i]))[0] == together[i]
    order = random.sample(range(len(requests)), random.randint(1, len(requests)))
    assert torch.equal(sample_torch(**pick(batch, order)), together[order])


@given(PARAMETERS, PARAMETERS)
@settings(max_examples=40, deadline=None)
def test_a_row_that_asks_for_nothing_ignores_its_neighbours_filters(mine, other):
    mine = (*mine[:3], 0, 1.0, 0.0, *mine[6:])
    batch = make_batch([mine, other], 5000)
    alone = {
        name: value[:1] for name, value in batch.items() if name not in ("top_k", "top_p", "min_p")
    }
    assert sample_torch(**batch)[0] == sample_torch(**alone)[0]


def test_rows_that_ask_for_nothing_are_not_filtered(monkeypatch):
    import minivllm.layers.sampler as sampler

    seen = []
    original = sampler.draw_filtered
    monkeypatch.setattr(
        sampler,
        "draw_filtered",
        lambda scaled, *rest, **kw: seen.append(len(scaled)) or original(scaled, *rest, **kw),
    )
    sampler.sample_torch(
        torch.randn(5, 100),
        torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]),
        torch.arange(5),
        torch.arange(5),
        top_k=torch.tensor([0, 5, 5, -1, 100]),
        top_p=torch.ones(5),
        min_p=torch.zeros(5),
    )
    assert seen == [1]


def test_seed_zero_is_a_seed_and_seeds_differ():  # F32
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    first, again, other = draws(logits, 300), draws(logits, 300), draws(logits, 300, seed=1)
    assert torch.equal(first, again) and (first == other).float().mean() < 0.05
    assert (
        draws(logits, 300, seed=2**32) == first
    ).float().mean() < 0.05  # the upper half of a seed counts


def test_global_generator_is_neither_read_nor_changed():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draws(FOUR, 50)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(draws(FOUR, 50), first)


# --- candidates


@given(st.integers(1, 300), st.integers(0, 10**6), st.booleans())
@settings(max_examples=50, deadline=None)
def test_most_likely_is_a_stable_sort(n, seed, coarse):
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(seed))
    x = (x * 2).round() if coarse else x
    x[0, :40] = -torch.inf
    scaled = x - x.max(-1, keepdim=True).values
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    values, got = most_likely(scaled, n)
    assert torch.equal(got, ids[:, :n]) and torch.equal(values, ordered[:, :n])


@pytest.mark.parametrize("n", [FIRST_CANDIDATES, 1000, 20_000])
def test_more_candidates_do_not_change_a_decision(n):
    scaled = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)) * 2
    scaled -= scaled.max(-1, keepdim=True).values
    values, _ = most_likely(scaled, n)
    options = (
        torch.tensor([20_000, 20_000, 30, 64]),
        torch.tensor([0.3, 1.0, 0.9, 0.5]),
        torch.tensor([0.0, 0.05, 0.0, 0.01]),
    )
    keep = keep_prefix(values, scaled, *options)
    everything = keep_prefix(most_likely(scaled, 20_000)[0], scaled, *options)
    assert torch.equal(keep, everything[:, :n])
    assert (keep[:, 1:] <= keep[:, :-1]).all() and keep[:, 0].all()  # a prefix, never empty


def test_first_stays_and_one_is_all():  # F30
    "The best token stays though p vanishes in float32; p = 1 keeps what can't change a sum"
    scaled = torch.tensor([[0.0, -1.0, -60.0]]).expand(3, -1)
    keep = keep_prefix(
        scaled, scaled, torch.tensor([3, 3, 2]), torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3)
    )
    assert keep.tolist() == [[True, False, False], [True, True, True], [True, True, False]]


# --- half precision, excluded and unusable rows


def test_bfloat16_logits_are_sampled_in_float32():  # F39
    logits = torch.zeros(151_936, dtype=torch.bfloat16)
    logits[-1] = 8.0
    exact = math.exp(8) / (math.exp(8) + 151_935)
    assert abs(logits.float().softmax(-1)[-1].item() - exact) < 1e-3
    hits = (draws(logits, 1200) == 151_935).sum().item()
    assert abs(hits - 1200 * exact) < 3.3 * (1200 * exact * (1 - exact)) ** 0.5
    small = torch.randn(8, 500).bfloat16()
    options = rows(8, temperature=0.7, top_k=20, top_p=0.9) | dict(
        seeds=torch.arange(8), positions=torch.arange(8)
    )
    assert torch.equal(sample_torch(small, **options), sample_torch(small.float(), **options))


def test_no_step_of_a_draw_is_in_half_precision():  # F39: a rounded score or noise moves some rows
    n, vocab_size = 1000, 600
    logits = (2 * torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(0))).bfloat16()
    keys = dict(seeds=torch.arange(n), positions=torch.arange(n))
    expected = reference_draw((logits.double() - logits.double().amax(1, keepdim=True)) / 0.75, **keys)
    assert torch.equal(sample_torch(logits, **rows(n, temperature=0.75), **keys), expected)
    for filters in ({"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}):
        options = rows(n, temperature=0.75, **filters) | keys
        assert torch.equal(sample_torch(logits, **options), sample_torch(logits.float(), **options))


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 3.4e38])
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}],
)
def test_unusable_rows(temperature, filters):  # F39
    logits = torch.zeros(6, 500)
    logits[1, 300] = torch.nan
    logits[2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 444] = 0.5  # a single token is left: always that one
    logits[4, 2] = torch.inf
    logits[5] = torch.nan
    before = logits.clone()
    ids = sample_torch(
        logits,
        seeds=torch.arange(6),
        positions=torch.arange(6),
        **rows(6, temperature=temperature, **filters),
    ).tolist()
    assert ids[1] == ids[2] == ids[4] == ids[5] == -1 and ids[3] == 444 and 0 <= ids[0] < 500
    torch.testing.assert_close(logits, before, equal_nan=True)
    good = sample_torch(
        logits[:1],
        seeds=torch.arange(1),
        positions=torch.arange(1),
        **rows(1, temperature=temperature, **filters),
    )
    assert good.tolist() == ids[:1]


def test_excluded_tokens_are_never_drawn():
    logits = torch.zeros(300)
    logits[::2] = -torch.inf
    for filters in ({}, {"top_k": 200}, {"top_p": 0.99}, {"min_p": 0.5}):
        assert (draws(logits, 500, **filters) % 2 == 1).all()


def test_module_is_the_function():
    batch = make_batch(
        [(1.0, 5, 6, 3, 0.9, 0.0, 3.0, 1, False), (0.0, 5, 6, 0, 1.0, 0.0, 3.0, 2, False)], 100
    )
    assert torch.equal(Sampler()(**batch), sample_torch(**batch))
    with torch.inference_mode():
        assert torch.equal(Sampler()(**batch), sample_torch(**batch))


# --- the kernels


@pytest.fixture
def tiles(monkeypatch):
    "Blocks so small that a small vocabulary has many; short and long prefixes"
    set_tiles(monkeypatch, 16, 128, 64)


def set_tiles(monkeypatch, block, scan, capacity):
    for name, value in dict(BLOCK=block, BLOCKS=4, LANES=scan, SCAN=2 * scan, CAPACITY=capacity, FILTER_WARPS=4).items():
        monkeypatch.setattr(sampler, name, value)


def same_tokens(batch, device=KERNEL_DEVICES[0]):
    "Whether the kernels draw what the twin draws"
    got = sample_triton(**{name: value.to(device) for name, value in batch.items()})
    assert got.dtype == torch.int64 and got.device.type == device
    return torch.equal(got.cpu(), sample_torch(**batch))


def on_kernels(batch):
    "The tokens that the kernels draw"
    return sample_triton(**{name: value.to(KERNEL_DEVICES[0]) for name, value in batch.items()}).cpu()


def is_close_call(logits, temperature, top_k, top_p, min_p):
    "A mass so near to p, or a probability so near to min_p, that rounding decides"
    if temperature == 0:
        return False
    scaled = ((logits - logits.max()) / torch.tensor(temperature)).tolist()
    floors = [abs(s - math.log(min_p)) < 1e-5 for s in scaled] if 0 < min_p < 1 else []
    return any(floors) or reference_kept(scaled, top_k, top_p, min_p) is None


@given(
    st.lists(PARAMETERS, min_size=1, max_size=3),
    st.sampled_from([(1, 16, 64, 32), (3, 16, 64, 32), (257, 16, 64, 32), (640, 16, 256, 64), (1000, 16, 512, 256)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=20, deadline=None)
def test_kernels_draw_the_twins_tokens(requests, sizes, dtype):
    vocab_size, *sizes = sizes
    batch = make_batch(requests, vocab_size)
    batch["logits"] = batch["logits"].to(dtype)
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_tiles(monkeypatch, *sizes)
        got, twin = on_kernels(batch), sample_torch(**batch)
    for i, (temperature, _, _, *filters, _, _, _) in enumerate(requests):
        assert got[i] == twin[i] or is_close_call(batch["logits"][i].float(), temperature, *filters)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_k": 200}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_kernels_on_awkward_rows(device, filters, tiles):
    n, generator = 2, torch.Generator().manual_seed(0)
    wide = 0.5 * torch.randn(n, 520, generator=generator)  # flat: every id that is kept may win
    excluded = wide.clone()
    excluded[:, :512] = -torch.inf  # whole tiles and parts without a token
    for name, logits in {
        "contiguous": wide,
        "odd size": wide[:, :403].contiguous(),
        "cut out": wide[:, 3:477],
        "every second row": wide.repeat_interleave(2, 0)[::2],
        "transposed": wide.T.contiguous().T,
        "one row for all": wide[:1].expand(n, -1),
        "ties": (4 * wide).round(),
        "all equal": torch.zeros(n, 520),
        "mostly excluded": excluded,
        "float64": wide.double(),
        "bfloat16": wide.bfloat16(),
        "bfloat16, a tile cut off": wide[:, :406].bfloat16(),
        "bfloat16, odd size": wide[:, :403].bfloat16(),
        "bfloat16, rows at odd distances": torch.cat([wide, wide[:, :1]], 1).bfloat16()[:, :520],
        "bfloat16, from an odd place": wide.bfloat16()[:, 3:477],
        "bfloat16, ties": (4 * wide).round().bfloat16(),
        "bfloat16, mostly excluded": excluded.bfloat16(),
    }.items():
        keys = dict(seeds=torch.arange(n) * 2**33 + 1, positions=torch.arange(n) * 1000)
        for temperature in (0.0, 0.7) if not filters else (0.7,):
            batch = dict(logits=logits, **rows(n, temperature=temperature, **filters), **keys)
            assert same_tokens(batch, device), (name, temperature)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1.0, 3.4e38])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 1.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of the latter two are read as a word
@pytest.mark.filterwarnings("ignore:overflow", "ignore:All-NaN", "ignore:divide by zero", "ignore:invalid value")  # of the interpreter
def test_kernels_refuse_what_the_twin_refuses(device, dtype, temperature, filters, tiles):
    logits = 3e3 * torch.randn(8, 600, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    logits[0, 550] = torch.nan
    logits[1, 0] = torch.nan
    logits[2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 599] = -5.0  # a single token is left
    logits[4, 350] = torch.inf
    logits[5] = torch.nan
    logits[6, 1:] = -torch.inf
    batch = dict(logits=logits.to(dtype), **rows(8, temperature=temperature, **filters), seeds=torch.arange(8), positions=torch.arange(8))
    assert same_tokens(batch, device)
    assert sample_torch(**batch).tolist()[:7] == [-1, -1, -1, 599, -1, -1, 0]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_kernels_without_rows(device):
    none = torch.empty(0, dtype=torch.int64, device=device)
    ids = sample_triton(torch.empty(0, 50, device=device), none.float(), none, none, top_k=none)
    assert ids.shape == (0,) and ids.dtype == torch.int64


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_kernels_read_parameters_that_are_not_contiguous(device, tiles):
    batch = make_batch([(1.0, s, 5, 4, 0.9, 0.01, 3.0, s, False) for s in range(4)], 300)
    spread = {name: x if x.ndim == 2 else torch.stack([x, x + 1], 1)[:, 0] for name, x in batch.items()}
    spread["temperature"] = torch.ones(1).expand(4)
    assert not spread["seeds"].is_contiguous() and same_tokens(spread, device)


@given(st.lists(PARAMETERS, min_size=2, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=5, deadline=None)
def test_a_kernels_row_depends_on_itself_alone(requests, random):  # F32
    batch = make_batch(requests, 300)
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_tiles(monkeypatch, 16, 128, 64)
        together = on_kernels(batch)
        order = random.sample(range(len(requests)), random.randint(1, len(requests)))
        assert torch.equal(on_kernels(pick(batch, order)), together[order])


@pytest.mark.parametrize("filters", [{"top_k": 150}, {"top_p": 0.6}, {"top_k": 150, "top_p": 0.6}, {"top_p": 1e-60}])
def test_prefixes_that_do_not_fit_the_shortlist(filters, monkeypatch):
    "Nearly flat logits: the winner is mostly none of the few that the list holds"
    set_tiles(monkeypatch, 16, 64, 32)
    logits = 0.01 * torch.randn(6, 250, generator=torch.Generator().manual_seed(0))
    keys = dict(seeds=torch.arange(6), positions=torch.arange(6))
    assert same_tokens(dict(logits=logits, **rows(6, temperature=1.0, **filters), **keys))


@pytest.mark.parametrize("blocks, block", [(1, 256), (2, 64), (16, 16), (8, 256)])
def test_programs_change_nothing(blocks, block, monkeypatch):
    "However many blocks a program takes, the first to arrive is the same"
    batch = make_batch([(t, s, 5, 0, 1.0, 0.0, 2.0, s, True) for s, t in enumerate((0.0, 0.5, 1.0, 1.0))], 1000)
    for name in ("top_k", "top_p", "min_p"):
        del batch[name]
    monkeypatch.setattr(sampler, "BLOCK", block)
    monkeypatch.setattr(sampler, "BLOCKS", blocks)
    assert same_tokens(batch)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:All-NaN", "ignore:divide by zero", "ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-4, 0.7, 3.4e38])
def test_two_logits_in_a_word_have_the_masses_of_two_logits(device, temperature):
    n = 8
    logits = 3 * torch.randn(n, 5000, generator=torch.Generator().manual_seed(0))  # two programs, the second's blocks cut off
    logits[1, ::500] = torch.nan
    logits[2, :1000], logits[3, 7], logits[4] = -torch.inf, torch.inf, 2.5
    logits[5] *= 1e30
    logits[6] -= 1000
    logits[7, 512:768] = torch.nan  # a block of nothing else
    logits, temperatures = logits.bfloat16().to(device), torch.full((n,), temperature, device=device)
    assert sampler.can_pack(logits) and not sampler.can_pack(logits.float())
    packed = sampler.block_masses(logits, temperatures, [None] * 3)
    plain = sampler.block_masses(logits.float(), temperatures, [None] * 3)
    assert torch.equal(packed[0], plain[0])
    usable = plain[0] < torch.inf  # where there is a NaN, nobody looks at the mass
    assert not usable[[1, 3, 7]].all(1).any() and usable[[0, 2, 4, 5, 6]].all()
    torch.testing.assert_close(packed[1][usable], plain[1][usable], rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("dtype, vocab_size", [(torch.float32, 1003), (torch.float16, 1000), (torch.bfloat16, 1003), (torch.bfloat16, 1000)])
def test_blocks_leave_logarithms_and_say_what_is_unusable(device, dtype, vocab_size, monkeypatch):
    "A finite peak and the log of a mass; -inf: no token; inf: an infinite logit, or a NaN"
    monkeypatch.setattr(sampler, "BLOCK", 64)
    logits = 3 * torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[:, 64:128], logits[:, 130], logits[:, 200], logits[:, -1] = -torch.inf, torch.nan, torch.inf, torch.nan
    logits, temperatures = logits.to(dtype), torch.tensor([0.0, 0.3, 2.0])
    peak, mass = sampler.block_masses(logits.to(device), temperatures.to(device), [None] * 3).cpu()
    assert (peak[:, 1] == -torch.inf).all() and (peak[:, [2, 3, -1]] == torch.inf).all()
    usable, divisor = [0, *range(4, 15)], torch.where(temperatures > 0, temperatures, 1).double()[:, None, None]
    blocks = logits[:, : 15 * 64].double().unflatten(1, (15, 64))[:, usable]
    assert torch.equal(peak[:, usable].double(), blocks.amax(2))
    exact = ((blocks - blocks.amax(2, keepdim=True)) / divisor).logsumexp(2)
    torch.testing.assert_close(mass[:, usable].double(), exact, rtol=0, atol=2e-6)


def awkward_rows(n, vocab_size, dtype):
    "Ends of rows, ties, unusable rows, empty blocks, huge logits"
    huge, logits = torch.finfo(dtype).max, 3 * torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(n))
    logits[1], logits[2, 5], logits[3] = logits[1].round(), torch.nan, -torch.inf
    logits[4], logits[5, 3] = -torch.inf, torch.inf
    logits[4, -1] = -5.0
    logits[6] *= 1000
    logits[7] *= huge / 50
    logits[8, vocab_size // 2 :], logits[9, 64:128], logits[10] = -torch.inf, torch.nan, logits[10] - 1000
    logits[11], logits[12], logits[13] = 0.0, -torch.inf, -0.9 * huge
    logits[12, ::97], logits[13, 7::150], logits[14, -1] = 2.0, 0.9 * huge, torch.nan
    logits[15] = logits[15].sign()
    return logits.to(dtype)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:All-NaN", "ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("temperature", [None, 0.0, 1e-45, 1e-37, 1e-4, 3.4e38])
@pytest.mark.parametrize("dtype, vocab_size", [(torch.float32, 1003), (torch.float16, 1000), (torch.bfloat16, 1003), (torch.bfloat16, 1000)])
def test_kernels_draw_the_twins_tokens_at_any_temperature(device, dtype, vocab_size, temperature, monkeypatch):
    "And a row's are the same among others and alone, whether its neighbours ask for filters or not"
    set_tiles(monkeypatch, 64, 256, 64)
    n = 16
    temperatures = torch.linspace(0, 1.5, n) if temperature is None else torch.full((n,), temperature)
    batch = dict(logits=awkward_rows(n, vocab_size, dtype), temperature=temperatures, seeds=torch.arange(n) * 2**33 + 1, positions=torch.arange(n) * 1000 + 7)
    assert same_tokens(batch, device)
    twin = sample_torch(**batch)
    assert twin[[2, 3, 5, 9, 14]].tolist() == [-1] * 5 and twin[4] == vocab_size - 1 and (twin >= 0).sum() == n - 5
    order = [11, 4, 2]
    some = pick(batch, order) | dict(top_k=torch.tensor([0, 3, 0]))
    assert torch.equal(on_kernels(some)[[0, 2]], twin[[11, 2]])


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_on_either_axis_of_the_grid(device, packed):
    "More rows than a grid's second axis takes lie on its first"
    logits = torch.randn(3, 1300, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    temperature, found = torch.tensor([0.0, 0.5, 1.0], device=device), torch.zeros(2, 2, 3, 21, device=device)
    for axis, masses in enumerate(found):
        sampler.block_mass_kernel[(3, 6) if axis == 0 else (6, 3)](
            logits, 1300, temperature, None, None, None, *masses, 1300, 21, 4, 64, packed, axis
        )
    assert torch.equal(found[0], found[1]) and (found[0, 1] > 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_rows_than_a_second_axis_takes(dtype):
    n = 70_000
    logits = torch.randn(n, 16, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    keys = dict(seeds=torch.arange(n, device="cuda"), positions=torch.arange(n, device="cuda"))
    batch = dict(logits=logits, temperature=torch.ones(n, device="cuda"), **keys)
    assert (sample_triton(**batch) == sample_torch(**batch)).sum() >= n - 2


def test_kernels_draw_the_twins_tokens_from_a_whole_vocabulary():
    n = 4
    logits = 2 * torch.randn(n, 151_936, generator=torch.Generator().manual_seed(0)).bfloat16()
    keys = dict(seeds=torch.arange(n), positions=torch.arange(n))
    assert same_tokens(dict(logits=logits, temperature=torch.tensor([0.0, 0.5, 1.0, 2.0]), **keys))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("passes, dtype", [(8, torch.bfloat16), (10, torch.float16), (16, torch.float32)])
def test_an_order_without_gaps(device, passes, dtype):
    "Integers order like the logits, and their highest bits are enough to give a logit back"
    x = torch.randn(128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 128)
    x[:4] = torch.tensor([0.0, -torch.inf, 1.0, -1.0])
    x = x.to(dtype).float().sort().values.to(device)
    order, back = torch.empty(128, dtype=torch.int64, device=device), torch.empty(128, device=device)
    order_kernel[(1,)](x, order, back, passes, 128)
    assert (order[1:] >= order[:-1]).all() and torch.equal(order[1:] == order[:-1], x[1:] == x[:-1])
    assert torch.equal(back, x)


@triton.jit
def order_kernel(x_ptr, order_ptr, back_ptr, PASSES: tl.constexpr, N: tl.constexpr):
    order = sampler.order_of(tl.load(x_ptr + tl.arange(0, N)))
    tl.store(order_ptr + tl.arange(0, N), order.to(tl.int64))
    known = (order >> (32 - 2 * PASSES)) << (32 - 2 * PASSES)
    tl.store(back_ptr + tl.arange(0, N), sampler.logit_of(known, PASSES))


def test_dispatcher_takes_torch_on_the_cpu(monkeypatch):
    monkeypatch.setattr(sampler, "sample_triton", None)
    batch = make_batch([(1.0, 5, 6, 3, 0.9, 0.0, 3.0, 1, False)], 100)
    assert torch.equal(sample(**batch), sample_torch(**batch))


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA GPU")


@NEEDS_CUDA
@pytest.mark.parametrize("implementation", [sample_torch, sample_triton])
def test_gpu_draws_the_same_tokens(implementation):
    requests = [
        (t, s, s * 7, k, p, m, 4.0, s, False)
        for s, (t, k, p, m) in enumerate(
            [
                (0.0, 0, 1.0, 0.0),
                (1.0, 0, 1.0, 0.0),
                (0.7, 50, 1.0, 0.0),
                (0.7, 0, 0.9, 0.0),
                (1.0, 0, 1.0, 0.05),
                (1.0, 20, 0.9, 0.01),
            ]
            * 20
        )
    ]
    batch = make_batch(requests, 50_000)
    on_gpu = implementation(**{name: value.cuda() for name, value in batch.items()}).cpu()
    assert (on_gpu == sample_torch(**batch)).sum() >= len(
        requests
    ) - 1  # logarithms may differ in the last digit


@NEEDS_CUDA
def test_a_recorded_step_draws_by_what_its_tensors_hold():
    "No kernel choice, grid or launch depends on a tensor's values"
    def batch_of(seed):
        requests = [
            (t, s, s * 7 + seed, k, p, m, 4.0, s + seed, False)
            for s, (t, k, p, m) in enumerate([(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 50, 0.9, 0.05), (1.5, 0, 0.99, 0.0)] * 8)
        ]
        return make_batch(requests[seed:] + requests[:seed], 50_000)

    batch = {name: value.cuda() for name, value in batch_of(0).items()}
    sample(**batch)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = sample(**batch)
    for seed in (1, 2, 3):
        fresh = batch_of(seed)
        for name, value in fresh.items():
            batch[name].copy_(value)
        graph.replay()
        assert (token_ids.cpu() == sample_torch(**fresh)).sum() >= len(token_ids) - 1


# --- several answers to a request


def with_choices(batch):
    return {**batch, "choices": torch.arange(len(batch["seeds"])) % 3}


def test_each_choice_has_numbers_of_its_own():
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).expand(300, -1)
    keys = dict(seeds=torch.zeros(300, dtype=torch.int64), positions=torch.arange(300))
    for filters in ({}, {"top_k": 100}, {"top_p": 0.9}):
        params = rows(300, temperature=1.0, **filters)
        first, named, other = (
            sample_torch(logits, **params, **keys, **choices)
            for choices in ({}, rows(300, choices=0), rows(300, choices=1))
        )
        assert torch.equal(first, named) and (first == other).float().mean() < 0.2


@given(st.lists(PARAMETERS, min_size=1, max_size=3), st.sampled_from([100, 300]))
@settings(max_examples=10, deadline=None)
def test_kernels_know_the_choice(requests, vocab_size):
    batch = with_choices(make_batch(requests, vocab_size))
    for row, call in enumerate(zip(*(batch[name].tolist() for name in ("temperature", "top_k", "top_p", "min_p")))):
        if is_close_call(batch["logits"][row], *call): return
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_tiles(monkeypatch, 16, 128, 64)
        assert same_tokens(batch)


# --- penalties, bans, log-probabilities


def adjusted(logits, prompts, outputs, repetition=1.0, frequency=0.0, presence=0.0, banned=(), unknown=False):
    "`adjust_logits` of rows with these tokens; `unknown`: the host doesn't know the newest of them"
    n, histories = len(logits), [p + o for p, o in zip(prompts, outputs)]
    newest = torch.tensor([h[-1] for h in histories])
    if unknown: histories = [h[:-1] + [-1] for h in histories]
    at = torch.tensor([row for row, h in enumerate(histories) for _ in h])
    is_output = torch.tensor([i >= len(p) for p, h in zip(prompts, histories) for i in range(len(h))])
    penalties = [torch.as_tensor(x, dtype=torch.float32).expand(n) for x in (repetition, frequency, presence)]
    bans = torch.tensor(banned, dtype=torch.int64).reshape(-1, 2).unbind(1) if banned else (None, None)
    return adjust_logits(logits, newest, torch.tensor(sum(histories, [])), at, is_output, *penalties, *bans)


HISTORIES = st.lists(
    st.tuples(st.lists(st.integers(0, 39), min_size=1, max_size=12), st.lists(st.integers(0, 39), max_size=12)),
    min_size=1, max_size=4,
)


@given(HISTORIES, st.sampled_from([0.5, 1.0, 1.3, 4.0]), st.sampled_from([-2.0, 0.0, 0.7]), st.sampled_from([-1.0, 0.0, 2.0]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_penalties_by_hand(histories, repetition, frequency, presence, unknown):
    prompts, outputs = (list(x) for x in zip(*histories))
    logits = torch.randn(len(prompts), 40, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    result = adjusted(logits, prompts, outputs, repetition, frequency, presence, unknown=unknown)
    assert torch.equal(logits, before)  # they are needed once more
    for row, (prompt, output) in enumerate(histories):
        for token_id in range(40):
            value = before[row, token_id].item()
            if token_id in prompt + output: value = value / repetition if value > 0 else value * repetition
            value -= frequency * output.count(token_id) + presence * (token_id in output)
            assert result[row, token_id].item() == pytest.approx(value, abs=1e-5)


def test_repetition_penalty_is_transformers():
    logits = 3 * torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    prompts, outputs = [[1, 2, 3]] * 3, [[4, 4], [5], [6, 7, 1]]
    for penalty in (0.8, 1.0, 1.7):
        result = adjusted(logits, prompts, outputs, penalty)
        for row, (prompt, output) in enumerate(zip(prompts, outputs)):
            theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[row : row + 1])
            assert torch.equal(result[row : row + 1], theirs)


def test_rows_without_a_penalty_keep_their_logits():
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    result = adjusted(logits, [[1], [2]], [[3, 3], [4]], repetition=[1.0, 2.0], frequency=[0.0, 1.0])
    assert result.dtype == torch.float32 and torch.equal(result[0], logits[0].float()) and (result[1] != logits[1].float()).sum() == 2
    nothing = [None] * 8
    assert adjust_logits(logits, torch.tensor([3, 4]), *nothing) is logits


def test_banned_tokens_are_never_drawn():
    logits = torch.zeros(300, 4)
    logits[:, 2] = 50.0
    banned = [(row, token_id) for row in range(0, 300, 2) for token_id in (2, 3)]
    result = adjusted(logits, [[0]] * 300, [[]] * 300, banned=banned)
    ids = sample_torch(result, **rows(300, temperature=1.0, seeds=0), positions=torch.arange(300))
    assert set(ids[::2].tolist()) == {0, 1} and set(ids[1::2].tolist()) == {2}
    nothing_left = adjusted(logits[:1], [[0]], [[]], banned=[(0, i) for i in range(4)])
    assert sample_torch(nothing_left, **rows(1, temperature=0.0, seeds=0, positions=0)).tolist() == [-1]


@pytest.mark.parametrize("n", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_softmax(n):
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    logits[0] = torch.arange(30) // 2  # pairs of equal ones: the lower id is the likelier
    drawn = torch.arange(40) % 30
    ids, logprobs, ranks = top_logprobs(logits, drawn, n)
    expected = logits.log_softmax(-1)
    assert ids.shape == logprobs.shape == (40, 1 + n) and torch.equal(ids[:, 0], drawn)
    torch.testing.assert_close(logprobs, expected.gather(1, ids), rtol=0, atol=1e-6)
    for row in range(40):
        order = sorted(range(30), key=lambda i: (-expected[row, i].item(), i))
        assert ids[row, 1:].tolist() == order[:n] and ranks[row] == 1 + order.index(drawn[row].item())


def test_more_logprobs_than_tokens_and_none_at_all():
    ids, logprobs, ranks = top_logprobs(torch.zeros(2, 3), torch.tensor([1, -1]), 20)
    assert ids.shape == logprobs.shape == (2, 4) and ranks.tolist() == [2, 1]
    ids, logprobs, ranks = top_logprobs(torch.zeros(0, 3), torch.empty(0, dtype=torch.int64), 2)
    assert ids.shape == (0, 3) and ranks.shape == (0,)


CONFIDENCE = 1e-4  # a correct sampler is refused once in ten thousand test runs; seeds are fixed, so it stays as it is


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.7),
        dict(temperature=1.5, top_k=7),
        dict(top_p=0.8),
        dict(min_p=0.1),
        dict(temperature=0.8, top_k=12, top_p=0.9),
        dict(repetition=1.5),
        dict(temperature=0.9, repetition=1.2, top_k=15, top_p=0.95),
        dict(temperature=0.9, frequency=0.4, presence=0.3),
    ],
)
def test_the_distribution_is_that_of_transformers_processors(options):
    "20,000 draws against the probabilities that transformers' processors leave (frequency and presence: by hand)"
    logits = 2 * torch.randn(1, 30, generator=torch.Generator().manual_seed(3))
    prompt, output = [1, 2, 3, 4], [5, 5, 6, 1]
    penalties = {name: options[name] for name in ("repetition", "frequency", "presence") if name in options}
    reference = logits.clone()
    if "repetition" in options:
        reference = transformers.RepetitionPenaltyLogitsProcessor(options["repetition"])(torch.tensor([prompt + output]), reference)
    for token_id in set(output):
        reference[0, token_id] -= options.get("frequency", 0) * output.count(token_id) + options.get("presence", 0)
    for name, processor in (
        ("temperature", transformers.TemperatureLogitsWarper), ("min_p", transformers.MinPLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper), ("top_p", transformers.TopPLogitsWarper),
    ):
        if name in options: reference = processor(options[name])(None, reference)
    probs = reference[0].softmax(-1)
    ours = adjusted(logits, [prompt], [output], **penalties)[0]
    ids = draws(ours, 20_000, **{"temperature": 1.0, **{k: v for k, v in options.items() if k not in penalties}})
    kept = probs > 0
    assert kept[ids].all()
    renumbered = torch.cumsum(kept, 0)[ids] - 1
    assert p_value(renumbered, probs[kept]) > CONFIDENCE
    if penalties:  # the test would see it if they were missing
        plain = draws(logits[0], 20_000, **{"temperature": 1.0, **{k: v for k, v in options.items() if k not in penalties}})
        assert not kept[plain].all() or p_value(torch.cumsum(kept, 0)[plain] - 1, probs[kept]) < CONFIDENCE
