"""What the Triton kernels share: products, norms, gates.

A matrix W lies in memory as torch keeps it, (out, in). PRECISION says how a product rounds its inputs: "tf32"; "half",
which keeps as many bits, of numbers neither tiny nor huge; or "tf32x3", which adds what tf32 cut off in two more
products and so comes out as exact as float32. Sums are float32.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl


def shares(size: int, share: int) -> int:
    """How many shares of so many make up the whole."""
    return -(-size // share)


@triton.jit
def mixed(x):
    """Every bit of a 32-bit number depends on every other (the finalizer of MurmurHash3, by Appleby)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


NATIVE = tl.constexpr(isinstance(mixed, triton.JITFunction))
"""Whether a GPU's own instructions can be named: Triton's interpreter has none."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def times_loaded(a, b, PRECISION: tl.constexpr):
    """a b, both in registers."""
    a, b = rounded(a, PRECISION), rounded(b, PRECISION)
    return tl.dot(a, b, input_precision="tf32" if PRECISION == "half" else PRECISION)


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """x as products take it: under "half" in half precision, what is too large as the largest number there."""
    if PRECISION == "half" and x.dtype == tl.float32:
        if NATIVE:  # two numbers by one instruction
            x = tl.inline_asm_elementwise(
                "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return x


@triton.jit
def rectified(x, PRECISION: tl.constexpr):
    """The same of max(x, 0)."""
    if PRECISION == "half" and NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.relu.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    return rounded(tl.maximum(x, 0.0), PRECISION)


@triton.jit
def scaled(x, gate, PRECISION: tl.constexpr):
    """x times a gate, whose size is at most 1, as products take it."""
    if PRECISION == "half" and NATIVE:  # two at a time, rounded as float32 would be
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [rounded(x, PRECISION), rounded(gate, PRECISION)],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return rounded(x.to(tl.float32) * gate, PRECISION)


@triton.jit
def read(ptr, mask):
    """What lies there, nothing where the mask is False: all that the pass reads but its weights. It is the first to
    leave the GPU's cache: what rollouts of other trainings read in each of their steps may stay."""
    return tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def write(ptr, x, mask):
    """The same for what is written."""
    tl.store(ptr, x, mask=mask, eviction_policy="evict_first")


@triton.jit
def fetched(ptr):
    """The 32-bit numbers that lie there, read by the threads that need them. A plain load is shared out for the sake of
    memory, and its numbers go through shared memory to where they are needed."""
    tl.static_assert(ptr.dtype.element_ty.primitive_bitwidth == 32)
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [ptr.to(tl.int64)], dtype=ptr.dtype.element_ty, is_pure=False, pack=1
        )
    return tl.load(ptr)


@triton.jit
def fetched_some(ptr, mask):
    """The same; nothing where the mask is False."""
    tl.static_assert(ptr.dtype.element_ty.primitive_bitwidth == 32)
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }", "=r,l,r",
            [ptr.to(tl.int64), mask.to(tl.int32)], dtype=ptr.dtype.element_ty, is_pure=False, pack=1,
        )  # fmt: skip
    return tl.load(ptr, mask=mask, other=0)


@triton.jit
def put(ptr, x, mask):
    """Half-precision numbers put there by the threads that have them, where a plain store would be shared out as well.
    Neighbours in a row are two to a register."""
    tl.static_assert(ptr.dtype.element_ty.primitive_bitwidth == 16)
    if NATIVE:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p<2>; .reg .b16 x<2>;
            setp.ne.s32 p0, $4, 0; setp.ne.s32 p1, $5, 0;
            mov.b32 {x0, x1}, $1;
            @p0 st.global.b16 [$2], x0; @p1 st.global.b16 [$3], x1;
            mov.b32 $0, 0;
            }""",
            "=r,r,l,l,r,r", [x, ptr.to(tl.int64), mask.to(tl.int32)], dtype=tl.float16, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        tl.store(ptr, x, mask=mask)


@triton.jit
def put_wide(ptr, x, mask):
    """The same for 32-bit numbers."""
    tl.static_assert(ptr.dtype.element_ty.primitive_bitwidth == 32)
    if NATIVE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$2], $1; mov.b32 $0, 0; }", "=r,r,l,r",
            [x, ptr.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(ptr, x, mask=mask)


@triton.jit
def late(x):
    """x, which has been asked for earlier, from here on. Without this the program waits where it asks: what products
    read is put into shared memory as soon as it is asked for."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=32 // x.dtype.primitive_bitwidth
        )
    return x


@triton.jit
def exp2(x):
    """2^x, as exact as Triton's own; what is below 1e-38 is nothing, which spares three instructions of four."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def exp(x):
    return exp2(x * LOG2_E)


@triton.jit
def inverse(x):
    """1 / x, to the last bit or two; beyond 8e37 nothing."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def times(x, w_ptr, out, inner, IN: tl.constexpr, PRECISION: tl.constexpr):
    """x W^T for W of shape (out, IN)."""
    return times_loaded(x, tl.load(w_ptr + out[None, :] * IN + inner[:, None]), PRECISION)


@triton.jit
def times_some(x, w_ptr, out, inner, IN: tl.constexpr, PRECISION: tl.constexpr):
    """The same where IN does not fill its block."""
    w = tl.load(w_ptr + out[None, :] * IN + inner[:, None], mask=(inner < IN)[:, None], other=0.0)
    return times_loaded(x, w, PRECISION)


@triton.jit
def normed(x, gamma, beta, D: tl.constexpr):
    """LayerNorm of each row."""
    z, _ = standardised(x, D)
    return z * gamma[None, :] + beta[None, :]


@triton.jit
def normed_at_once(x, gamma, beta, D: tl.constexpr, PRECISION: tl.constexpr):
    """The same where warps share rows: under "half" they wait for each other for one sum, not for the mean and then for
    the spread. What that loses is below the rounding of products unless a mean is some forty times its spread."""
    if PRECISION == "half":
        total, squares = tl.reduce((x, x * x), 1, _both_added)
        mean = total * (1 / D)
        scale = tl.rsqrt(tl.maximum(squares * (1 / D) - mean * mean, 0.0) + 1e-5)
        y = (x - mean[:, None]) * scale[:, None] * gamma[None, :] + beta[None, :]
    else:
        y = normed(x, gamma, beta, D)
    return y


@triton.jit
def _both_added(a, b, c, d):
    return a + c, b + d


@triton.jit
def norm_rows(x, w_ptr, b_ptr, d, D: tl.constexpr):
    """The same, with scale and bias where they lie."""
    return normed(x, tl.load(w_ptr + d), tl.load(b_ptr + d), D)


@triton.jit
def diagonal(u_ptr, d, E: tl.constexpr):
    """U (H, E, E) as one matrix (in, out) with the heads' matrices along its diagonal."""
    same_head = (d[:, None] // E) == (d[None, :] // E)
    at = (d[None, :] // E) * E * E + (d[None, :] % E) * E + d[:, None] % E
    return tl.load(u_ptr + at, mask=same_head, other=0.0)


@triton.jit
def tanh(x):
    return 1.0 - 2.0 * inverse(exp(2.0 * x) + 1.0)


@triton.jit
def standardised(x, D: tl.constexpr):
    """Each row with mean 0 and variance 1, and what it was multiplied with."""
    x = x - (tl.sum(x, 1) * (1 / D))[:, None]
    scale = tl.rsqrt(tl.sum(x * x, 1) * (1 / D) + 1e-5)
    return x * scale[:, None], scale


@triton.jit
def norm_backward(dy, z, scale, gamma, parts_ptr, d, D: tl.constexpr):
    """The gradient of what went into a LayerNorm; those of its scale and bias, over these rows, go to `parts_ptr`.

    Rows that are not there have dy = 0.
    """
    dgamma, dbeta = tl.reduce((dy * z, dy), 0, _both_added)  # warps wait for each other once
    tl.store(parts_ptr + d, dgamma)
    tl.store(parts_ptr + D + d, dbeta)
    return through_norm(dy, z, scale, gamma, D)


@triton.jit
def through_norm(dy, z, scale, gamma, D: tl.constexpr):
    """The same without those of scale and bias."""
    dz = dy * gamma[None, :]
    along = tl.sum(dz * z, 1) * (1 / D)
    return (dz - (tl.sum(dz, 1) * (1 / D))[:, None] - z * along[:, None]) * scale[:, None]


@triton.jit
def enlarged(peak_ptr, PRECISION: tl.constexpr):
    """What gradients are multiplied with while they are kept in half precision: the power of two that brings the
    largest, `peak`, to between 16 and 32. So they may grow by a thousand on their way down, and what is a millionth of
    the largest still counts. No number where the peak is none: a clamp must not hide it."""
    if PRECISION == "half":
        peak = tl.load(peak_ptr)
        exponent = tl.maximum((peak.to(tl.int32, bitcast=True) >> 23) & 255, 27)  # with its offset of 127
        exponent = tl.where(peak > 0, exponent, 131)
        scale = ((254 + 4 - exponent) << 23).to(tl.float32, bitcast=True)
        return tl.where(peak < float("inf"), scale, float("nan"))
    return 1.0


@triton.jit
def keys(seed, site):
    """Two numbers for a seed and a place in the network that drops."""
    low = mixed(seed.to(tl.uint32) + site.to(tl.uint32) * 0x9E3779B9)
    return low, mixed((seed >> 32).to(tl.uint32) ^ low)


@triton.jit
def dropped(x, seed_ptr, place, site, DROP: tl.constexpr):
    """x where it is kept, made larger for the rest: the same for the same (seed, place, site).

    Places are put in another order for each (seed, site), times one key and plus another, and mixed once: as good as
    this needs, and a small part of the work of Philox.
    """
    low, high = keys(tl.load(seed_ptr), site)
    drawn = mixed(place.to(tl.uint32) * (low | 1) + high)
    limit: tl.constexpr = int(DROP * 4294967296.0)
    return tl.where(drawn >= limit, x * (1 / (1 - DROP)), 0.0)


@triton.jit
def kept(seed, row, column, site, DROP: tl.constexpr):
    """Which entries of a block are not dropped: the same for the same (seed, row, column, site).

    A row and a column have a number each, and an entry their product. So there is one multiplication for an entry where
    a hash of its own would be a dozen instructions, which was a third of what some kernels did. Each number is well
    mixed and one of the two odd: all products are as likely, and any two entries all but independent.
    """
    low, high = keys(seed, site)
    by_row = mixed(row.to(tl.uint32) * (low | 1) + high)
    low, high = keys(seed, site * 0 - 1)  # columns have the same numbers everywhere
    by_column = column.to(tl.uint32) * (high | 1) + low
    by_column = ((by_column ^ (by_column >> 16)) * 0x85EBCA6B) | 1
    limit: tl.constexpr = int(DROP * 4294967296.0)
    return by_row[:, None] * by_column[None, :] >= limit


@triton.jit
def thinned(x, seed, row, column, site, DROP: tl.constexpr, scale=1.0):
    """x times the scale where it is `kept`, made larger for the rest."""
    x = x * (scale / (1 - DROP))
    if DROP > 0:
        x = tl.where(kept(seed, row, column, site, DROP), x, 0.0)
    return x
