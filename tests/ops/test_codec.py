"""Payloads of `Codec`: errors are within the documented bounds, and inf and nan stay at their elements."""

from __future__ import annotations

import pytest
import torch
from codec_cases import INF, NAN, check_equals_plain_pytorch, draw

from pyengine.ops.codec import Codec

SCALED = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
CODECS = [Codec("int8", 32), Codec("e4m3", 256), Codec("e5m2", 64), Codec("bf16"), Codec("fp16")]
SIZES = [0, 1, 33, 1000]
# (least, relative) by format: the largest error of rounding to nearest, with a scale s, is
# max(abs(x), s * least) * relative. The error of int8 depends only on s.
RELATIVE = {
    "e4m3": (2.0**-6, 2.0**-4 + 2.0**-21),
    "e5m2": (2.0**-14, 2.0**-3 + 2.0**-21),
    "bf16": (2.0**-126, 2.0**-8),
    "fp16": (2.0**-14, 2.0**-11),
}


def _name(codec):
    return f"{codec.format}-{codec.block}"


def _encoded(codec, values, **options):
    payload = torch.full((codec.num_bytes(values.numel()),), 0xAA, dtype=torch.uint8)
    codec.encode_(payload, values, **options)
    return payload


def _decoded(codec, payload, numel):
    values = torch.full((numel,), NAN)
    codec.decode_(values, payload)
    return values


def _scales(codec, payload, numel):
    """Return each element's scale in float64; 1 if the format has no scales."""
    if codec.block == 1:
        return torch.ones(numel, dtype=torch.float64)
    scales = payload[: 4 * -(-numel // codec.block)].clone().view(torch.float32)
    return scales.double().repeat_interleave(codec.block)[:numel]


def _bound(codec, values, scales, *, stochastic):
    if codec.format == "int8":
        return scales * (1 + 2.0**-14 if stochastic else 0.5 + 2.0**-15)
    least, relative = RELATIVE[codec.format]
    return torch.maximum(values.double().abs(), scales * least) * relative * (2 if stochastic else 1)


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("codec", CODECS, ids=_name)
def test_no_element_is_further_away_than_stated(codec, numel, seed):
    values = draw(numel).clamp(-60_000, 60_000)
    payload = _encoded(codec, values, seed=seed)
    got = _decoded(codec, payload, numel).double()
    bound = _bound(codec, values, _scales(codec, payload, numel), stochastic=seed is not None)
    assert ((got - values.double()).abs() <= bound).all()


@pytest.mark.parametrize("binades", [-120, 0, 110])
@pytest.mark.parametrize("name", SCALED)
def test_the_largest_of_a_block_stays_itself(name, binades):
    codec = Codec(name, 64)
    values = draw(640, binades=0) * 2.0**binades
    values[::64] *= 8
    largest = values.view(-1, 64).abs().amax(1)
    for seed in (None, 3):
        got = _decoded(codec, _encoded(codec, values, seed=seed), 640).view(-1, 64).abs().amax(1)
        # The quotient, the reciprocal and two products are each rounded by 2^-24. In a block with the
        # smallest possible scale, the largest value is between two codes.
        if binades >= 0:
            torch.testing.assert_close(got, largest, rtol=2.0**-22, atol=0)
        assert got.isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=_name)
def test_the_largest_float_does_not_overflow(codec):
    values = torch.full((64,), torch.finfo(torch.float32).max)
    values[::2] *= -1
    for seed in (None, *range(8)):
        got = _decoded(codec, _encoded(codec, values, seed=seed), 64)
        is_a_cast = codec.block == 1  # gives infinity, as in torch
        assert torch.equal(got.isinf(), torch.full((64,), is_a_cast))
        assert torch.equal(got.sign(), values.sign())


@pytest.mark.parametrize("codec", CODECS, ids=_name)
def test_zeros_and_denormals(codec):
    numel = 2 * max(codec.block, 32)
    values = torch.zeros(numel)
    values[-1] = 2.0**-149
    for seed in (None, 1):
        payload = _encoded(codec, values, seed=seed)
        if codec.block > 1:
            assert payload[:8].clone().view(torch.float32).tolist() == [0.0, 2.0**-110]
        assert torch.equal(_decoded(codec, payload, numel)[:-1], values[:-1])


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("position", [0, 96])
@pytest.mark.parametrize("codec", CODECS, ids=_name)
def test_what_is_not_finite_crosses_at_its_own_element(codec, position, value, seed):
    values = draw(97).clamp(-60_000, 60_000)
    values[values.abs() == values.abs().max()] = 1.0  # so that `position` does not hold the largest value
    expected = _decoded(
        codec, _encoded(codec, values.index_fill(0, torch.tensor([position]), 0.0), seed=seed), 97
    )
    values[position] = value
    residual = torch.zeros(97)
    got = _decoded(codec, _encoded(codec, values, residual=residual, seed=seed), 97)
    expected[position] = value if codec.format in ("e5m2", "bf16", "fp16") else NAN
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert residual[position] == 0
    assert residual.isfinite().all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("e4m3", torch.float8_e4m3fn),
        ("e5m2", torch.float8_e5m2),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ],
)
def test_codes_are_those_of_torch_s_casts(name, dtype):
    codec = Codec(name, 32) if name in SCALED else Codec(name)
    values = draw(32_000, binades=30)
    if name in SCALED:
        values = values.clamp(-SCALED[name], SCALED[name])
        values[::32] = SCALED[name]  # so that scales are 1
    else:
        values[:4] = torch.tensor([65_504.0, 65_519.0, 65_520.0, -1e6])
    codes = _encoded(codec, values)[4 * 1000 * (name in SCALED) :]
    assert torch.equal(codes, values.to(dtype).view(torch.uint8))


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_every_code_decodes_to_torch_s_value(name, dtype):
    codec, codes = Codec(name, 256), torch.arange(256).to(torch.uint8)
    payload = torch.cat([torch.ones(1).view(torch.uint8), codes])
    torch.testing.assert_close(
        _decoded(codec, payload, 256), codes.view(dtype).float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("codec", CODECS, ids=_name)
def test_ties_go_to_even(codec):
    step = {"int8": 1.0, "e4m3": 2.0**-3, "e5m2": 2.0**-2, "bf16": 2.0**-7, "fp16": 2.0**-10}[codec.format]
    first, largest = (0 if step == 1 else 1), SCALED.get(codec.format, 1.0)
    ties = torch.tensor([first + 0.5 * step, first + 1.5 * step, largest])  # scales are 1
    even = torch.tensor([first, first + 2 * step, largest])
    got = _decoded(codec, _encoded(codec, torch.cat([ties, -ties])), 6)
    assert torch.equal(got, torch.cat([even, -even]))


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("numel", [0, 33, 1025])
@pytest.mark.parametrize("codec", [*CODECS, Codec("e4m3", 32), Codec("int8", 1024)], ids=_name)
def test_the_core_has_the_bits_of_plain_pytorch(isa, monkeypatch, codec, numel, seed):
    check_equals_plain_pytorch(codec, numel, seed, torch.device("cpu"), monkeypatch)


@pytest.mark.parametrize("codec", [Codec("e4m3", 64), Codec("fp16")], ids=_name)
def test_threads_share_blocks(threads, monkeypatch, codec):
    check_equals_plain_pytorch(codec, 70_001, 5, torch.device("cpu"), monkeypatch)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("codec", CODECS, ids=_name)
def test_the_residual_is_what_was_lost(codec, numel, seed):
    values, before = draw(numel), draw(numel, seed=1, binades=30)
    residual = before.clone()
    payload = _encoded(codec, values, residual=residual, seed=seed)
    wanted = values + before
    assert torch.equal(payload, _encoded(codec, wanted, seed=seed))
    got = _decoded(codec, payload, numel)
    assert torch.equal(residual, torch.where(got.isfinite(), wanted - got, 0.0))


@pytest.mark.parametrize("seed", [None, -5])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("numel", [1, 1000])
@pytest.mark.parametrize("codec", CODECS, ids=_name)
def test_a_sum_is_that_of_the_decoded_in_their_order(codec, numel, world, seed):
    parts = [draw(numel, seed=rank) for rank in range(world)]
    rows = torch.full((world, codec.num_bytes(numel) + 8), 0xAA, dtype=torch.uint8)
    payloads = rows[:, :-8]  # the row stride is larger than the row
    for payload, part in zip(payloads, parts, strict=True):
        payload.copy_(_encoded(codec, part))
    wanted = _decoded(codec, payloads[0], numel)
    for payload in payloads[1:]:
        wanted += _decoded(codec, payload, numel)
    got = torch.full((numel,), NAN)
    codec.sum_(got, payloads)
    assert torch.equal(got, wanted)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = torch.empty(numel, dtype=dtype)
        codec.sum_(narrow, payloads)
        assert torch.equal(narrow, wanted.to(dtype))
    out, before = torch.full_like(payloads[0], 0xAA), draw(numel, seed=9)
    residual = before.clone()
    codec.sum_encode_(out, payloads, numel, residual=residual, seed=seed, offset=64)
    assert torch.equal(out, _encoded(codec, wanted, seed=seed, offset=64))
    decoded = _decoded(codec, out, numel)
    assert torch.equal(residual, before + torch.where(decoded.isfinite(), wanted - decoded, 0.0))
    again = torch.full_like(out, 0xAA)
    codec.sum_encode_(again, payloads, numel, seed=seed, offset=64)
    assert torch.equal(again, out)


@pytest.mark.parametrize("seed", [None, 123456789012345])
@pytest.mark.parametrize("codec", CODECS, ids=_name)
def test_parts_of_a_bucket_have_the_bits_of_the_whole(codec, seed):
    values = draw(1024)
    first = 512
    for offset in (0, 2**32 - 512):
        whole = _decoded(codec, _encoded(codec, values, seed=seed, offset=offset), 1024)
        head = _encoded(codec, values[:first], seed=seed, offset=offset)
        tail = _encoded(codec, values[first:], seed=seed, offset=offset + first)
        parts = torch.cat([_decoded(codec, head, first), _decoded(codec, tail, 1024 - first)])
        assert torch.equal(parts, whole)


@pytest.mark.parametrize("codec", CODECS, ids=_name)
def test_stochastic_rounding_is_right_on_average(codec):
    """A trial's variance is at most step^2 / 4, so a mean of N trials differs from x by more than
    5 step / sqrt(4 N) once in two million cases, or for one of these elements once in ten thousand runs. The
    seeds are fixed.
    """
    numel, trials = 192, 400
    values = draw(numel, binades=3)
    decoded = torch.stack(
        [_decoded(codec, _encoded(codec, values, seed=seed), numel) for seed in range(trials)]
    )
    scales = _scales(codec, _encoded(codec, values), numel)
    step = _bound(codec, values, scales, stochastic=True)
    assert ((decoded.double().mean(0) - values.double()).abs() <= 5 * step / (4 * trials) ** 0.5).all()
    assert (decoded != decoded[0]).any()


def test_scales_come_first_and_the_filling_is_zero():
    payload = _encoded(Codec("int8", 32), torch.tensor([127.0] + 32 * [-254.0]))
    assert payload[:8].view(torch.float32).tolist() == [2.0, 2.0]
    assert payload[8:].view(torch.int8).tolist() == [64] + 32 * [-127] + [0, 0, 0]


def test_the_filling_of_payloads_is_not_summed():
    codec = Codec("int8", 32)
    clean = torch.stack([_encoded(codec, torch.tensor([value])) for value in (1.0, 0.25)])
    filled, outs = clean.clone(), (torch.empty_like(clean[0]), torch.empty_like(clean[0]))
    filled[0, 5:] = torch.tensor([0x7F, 0x80, 0x7F], dtype=torch.uint8)
    for out, payloads in zip(outs, (clean, filled), strict=True):
        codec.sum_encode_(out, payloads, 1)
    assert torch.equal(*outs)


CODEC = Codec("int8", 32)
BYTES, VALUES = torch.zeros(CODEC.num_bytes(32), dtype=torch.uint8), torch.zeros(32)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: Codec("int4"), ValueError, "format='int4'; expected one of 'int8', 'e4m3'"),
        (lambda: Codec("int8", 48), ValueError, "block=48; expected one of 32, 64"),
        (lambda: Codec("bf16", 32), ValueError, "bf16 has no scales, so do not pass block"),
        (lambda: CODEC.num_bytes(-1), ValueError, r"numel=-1; expected 0 to 2\*\*40"),
        (lambda: CODEC.encode_(BYTES, VALUES.double()), TypeError, "values is torch.float64"),
        (lambda: CODEC.encode_(BYTES[1:], VALUES), ValueError, "payload has 35 bytes; expected 36"),
        (lambda: CODEC.encode_(BYTES, VALUES, residual=VALUES[1:]), ValueError, "residual is .*expected one"),
        (lambda: CODEC.encode_(BYTES, VALUES, residual=VALUES), ValueError, "residual shares memory"),
        (lambda: CODEC.encode_(BYTES, VALUES, seed=1.0), TypeError, "seed must be an int, .*; got float"),
        (lambda: CODEC.encode_(BYTES, VALUES, seed=2**63), ValueError, "expected an int64"),
        (lambda: CODEC.encode_(BYTES, VALUES, offset=-1), ValueError, "offset=-1; expected 0 to"),
        (lambda: CODEC.sum_encode_(BYTES, BYTES, 32), ValueError, r"payloads is .*expected \[W, 36\]"),
        (lambda: CODEC.sum_encode_(BYTES, BYTES.view(1, -1), 32), ValueError, "out shares memory with"),
        (lambda: CODEC.sum_encode_(BYTES[:34], BYTES.view(2, -1), 32), ValueError, "34 bytes; expected 36"),
        (lambda: CODEC.sum_(VALUES, BYTES.view(2, -1)), ValueError, r"expected \[W, 36\]"),
        (lambda: CODEC.decode_(VALUES, BYTES.float()), TypeError, "payload is torch.float32"),
        (
            lambda: CODEC.decode_(VALUES, torch.frombuffer(bytearray(44), dtype=torch.uint8, offset=3)[1:37]),
            ValueError,
            "payload begins . bytes after a multiple of 4",
        ),
        (
            lambda: CODEC.sum_(VALUES, torch.zeros(2, 37, dtype=torch.uint8)[:, :36]),
            ValueError,
            r"payloads\[1\] begins 1 bytes after a multiple of 4",
        ),
        (
            lambda: CODEC.sum_(VALUES, torch.zeros(36, 2, dtype=torch.uint8).T),
            ValueError,
            "payloads is .*expected a dense contiguous tensor",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
