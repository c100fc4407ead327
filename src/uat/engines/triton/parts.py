"""Shared functions of the Triton kernels: products, norms, loads and stores, dropout.

A matrix W is stored as in torch, (out, in). PRECISION is the rounding of a product's inputs: "tf32"; "half", which
keeps as many bits except of tiny and huge numbers; or "tf32x3", which adds the bits that tf32 cuts off in two more
products and is as exact as float32. Sums are float32.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl


def shares(size: int, share: int) -> int:
    """Return the number of shares of a given size that cover the whole (a rounded-up quotient)."""
    return -(-size // share)


@triton.jit
def mixed(x):
    """Mix the bits of a 32-bit number: every result bit depends on all bits (finalizer of MurmurHash3, by Appleby)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


NATIVE = tl.constexpr(isinstance(mixed, triton.JITFunction))
"""Whether inline GPU instructions can be used; Triton's interpreter does not support them."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def times_loaded(a, b, PRECISION: tl.constexpr):
    """Return a b, both in registers."""
    a, b = rounded(a, PRECISION), rounded(b, PRECISION)
    return tl.dot(a, b, input_precision="tf32" if PRECISION == "half" else PRECISION)


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """Round x for products: under "half" to half precision, with large numbers clamped to its range."""
    if PRECISION == "half" and x.dtype == tl.float32:
        if NATIVE:  # one instruction for two numbers
            x = tl.inline_asm_elementwise(
                "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return x


@triton.jit
def rectified(x, PRECISION: tl.constexpr):
    """Round max(x, 0) for products."""
    if PRECISION == "half" and NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.relu.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    return rounded(tl.maximum(x, 0.0), PRECISION)


@triton.jit
def scaled(x, gate, PRECISION: tl.constexpr):
    """Return x times a gate of absolute value at most 1, rounded for products."""
    if PRECISION == "half" and NATIVE:  # two at a time, rounded like float32
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [rounded(x, PRECISION), rounded(gate, PRECISION)],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return rounded(x.to(tl.float32) * gate, PRECISION)


@triton.jit
def read(ptr, mask):
    """Load numbers, or zeros if the mask is False. The training pass uses this load for everything but weights: the
    GPU's cache evicts such data first, so that data of concurrent rollouts can stay."""
    return tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def write(ptr, x, mask):
    """Store numbers that are evicted first from the GPU's cache, as in `read`."""
    tl.store(ptr, x, mask=mask, eviction_policy="evict_first")


@triton.jit
def fetched(ptr):
    """Load 32-bit numbers in the threads that need them. A plain load is distributed for coalesced access, and its
    numbers then pass through shared memory to the threads that need them."""
    tl.static_assert(ptr.dtype.element_ty.primitive_bitwidth == 32)
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [ptr.to(tl.int64)], dtype=ptr.dtype.element_ty, is_pure=False, pack=1
        )
    return tl.load(ptr)


@triton.jit
def fetched_some(ptr, mask):
    """Load 32-bit numbers like `fetched`, or zeros if the mask is False."""
    tl.static_assert(ptr.dtype.element_ty.primitive_bitwidth == 32)
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }", "=r,l,r",
            [ptr.to(tl.int64), mask.to(tl.int32)], dtype=ptr.dtype.element_ty, is_pure=False, pack=1,
        )  # fmt: skip
    return tl.load(ptr, mask=mask, other=0)


@triton.jit
def put(ptr, x, mask):
    """Store half-precision numbers directly from the threads that hold them, without the redistribution of a plain
    store. Two neighbours in a row share a register."""
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
    """Store 32-bit numbers directly from the threads that hold them, like `put`."""
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
    """Use x, whose load started earlier, from here on. Without this the program waits at the load: inputs of products
    are copied into shared memory right after their load."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=32 // x.dtype.primitive_bitwidth
        )
    return x


@triton.jit
def exp2(x):
    """Return 2^x, as exact as Triton's exp2, but 0 below 1e-38, which saves three instructions of four."""
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
    """Return 1 / x, accurate to the last bit or two; 0 for x beyond 8e37."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def times(x, w_ptr, out, inner, IN: tl.constexpr, PRECISION: tl.constexpr):
    """Return x W^T for W of shape (out, IN)."""
    return times_loaded(x, tl.load(w_ptr + out[None, :] * IN + inner[:, None]), PRECISION)


@triton.jit
def times_some(x, w_ptr, out, inner, IN: tl.constexpr, PRECISION: tl.constexpr):
    """Return x W^T if IN does not fill its block."""
    w = tl.load(w_ptr + out[None, :] * IN + inner[:, None], mask=(inner < IN)[:, None], other=0.0)
    return times_loaded(x, w, PRECISION)


@triton.jit
def normed(x, gamma, beta, D: tl.constexpr):
    """Apply LayerNorm to each row."""
    z, _ = standardised(x, D)
    return z * gamma[None, :] + beta[None, :]


@triton.jit
def normed_at_once(x, gamma, beta, D: tl.constexpr, PRECISION: tl.constexpr):
    """Apply LayerNorm if warps share rows. Under "half" they synchronise for a single sum rather than for the mean and
    then for the variance. The error is below the rounding of products unless a mean is some forty deviations."""
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
    """Apply LayerNorm to each row, with pointers to scale and bias."""
    return normed(x, tl.load(w_ptr + d), tl.load(b_ptr + d), D)


@triton.jit
def diagonal(u_ptr, d, E: tl.constexpr):
    """Load U (H, E, E) as one block-diagonal matrix (in, out)."""
    same_head = (d[:, None] // E) == (d[None, :] // E)
    at = (d[None, :] // E) * E * E + (d[None, :] % E) * E + d[:, None] % E
    return tl.load(u_ptr + at, mask=same_head, other=0.0)


@triton.jit
def tanh(x):
    return 1.0 - 2.0 * inverse(exp(2.0 * x) + 1.0)


@triton.jit
def standardised(x, D: tl.constexpr):
    """Standardise each row to mean 0 and variance 1; return it and the factor that scaled it."""
    x = x - (tl.sum(x, 1) * (1 / D))[:, None]
    scale = tl.rsqrt(tl.sum(x * x, 1) * (1 / D) + 1e-5)
    return x * scale[:, None], scale


@triton.jit
def norm_backward(dy, z, scale, gamma, parts_ptr, d, D: tl.constexpr):
    """Return the gradient of a LayerNorm's input; write those of its scale and bias, over these rows, to `parts_ptr`.

    Rows outside the data have dy = 0.
    """
    dgamma, dbeta = tl.reduce((dy * z, dy), 0, _both_added)  # warps synchronise only once
    tl.store(parts_ptr + d, dgamma)
    tl.store(parts_ptr + D + d, dbeta)
    return through_norm(dy, z, scale, gamma, D)


@triton.jit
def through_norm(dy, z, scale, gamma, D: tl.constexpr):
    """Return the gradient of a LayerNorm's input."""
    dz = dy * gamma[None, :]
    along = tl.sum(dz * z, 1) * (1 / D)
    return (dz - (tl.sum(dz, 1) * (1 / D))[:, None] - z * along[:, None]) * scale[:, None]


@triton.jit
def enlarged(peak_ptr, PRECISION: tl.constexpr):
    """Return the factor on gradients in half precision: the power of two that brings the largest one, `peak`, to
    between 16 and 32. Gradients may then grow by a thousand in the backward pass, and a millionth of the largest is
    still represented. NaN if the peak is not finite, so that clamping cannot hide it."""
    if PRECISION == "half":
        peak = tl.load(peak_ptr)
        exponent = tl.maximum((peak.to(tl.int32, bitcast=True) >> 23) & 255, 27)  # biased by 127
        exponent = tl.where(peak > 0, exponent, 131)
        scale = ((254 + 4 - exponent) << 23).to(tl.float32, bitcast=True)
        return tl.where(peak < float("inf"), scale, float("nan"))
    return 1.0


@triton.jit
def keys(seed, site):
    """Return two numbers for a seed and a dropout site in the network."""
    low = mixed(seed.to(tl.uint32) + site.to(tl.uint32) * 0x9E3779B9)
    return low, mixed((seed >> 32).to(tl.uint32) ^ low)


@triton.jit
def dropped(x, seed_ptr, place, site, DROP: tl.constexpr):
    """Apply dropout to x and rescale the rest, as a function of (seed, offset, site).

    Offsets are permuted for each (seed, site), by a multiplication and an addition of keys, and mixed once. This is
    random enough for dropout and a small part of the work of Philox.
    """
    low, high = keys(tl.load(seed_ptr), site)
    drawn = mixed(place.to(tl.uint32) * (low | 1) + high)
    limit: tl.constexpr = int(DROP * 4294967296.0)
    return tl.where(drawn >= limit, x * (1 / (1 - DROP)), 0.0)


@triton.jit
def kept(seed, row, column, site, DROP: tl.constexpr):
    """Return the mask of entries that are not dropped, as a function of (seed, row, column, site).

    Rows and columns are hashed, and an entry is the product of both hashes. That is one multiplication per entry; a
    hash per entry would take a dozen instructions, a third of the work of some kernels. Both hashes are well mixed and
    one of them is odd, so all products are equally likely and any two entries nearly independent.
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
    """Apply dropout by the mask `kept` to x, with rescaling."""
    x = x * (scale / (1 - DROP))
    if DROP > 0:
        x = tl.where(kept(seed, row, column, site, DROP), x, 0.0)
    return x
