"""Products of matrices and what else is linear algebra: MatMul, Gemm, Einsum, Det."""

from __future__ import annotations

import string
from typing import Any

from ep.errors import InvalidInput
from ep.ops.precision import in_wide, is_float, wide
from ep.registry import Factor, op


@op("MatMul")
def matmul(xp, a, b: Factor):
    return xp.matmul(a, b)


@op("Gemm", since=7)
def gemm(xp, a, b: Factor, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    product = xp.matmul(xp.transpose(a) if transA else a, xp.transpose(b) if transB else b)
    product = _scaled(xp, product, alpha)
    return product if c is None or beta == 0 else product + _scaled(xp, c, beta)


@op("Gemm")
def gemm_1(xp, a, b: Factor, c, *, alpha=1.0, beta=1.0, broadcast=0, transA=0, transB=0):
    return gemm(xp, a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)


def _scaled(xp: Any, x: Any, factor: float) -> Any:
    if factor == 1:
        return x
    dtype = xp.dtype_of(x)
    if not is_float(dtype) and factor == int(factor):
        return x * int(factor)
    return xp.astype(wide(xp, x) * factor, dtype)


@op("Einsum", since=12)
def einsum(xp, *inputs, equation):
    return xp.einsum(explicit(equation, [x.ndim for x in inputs]), *inputs)


def explicit(equation: str, ranks: list[int]) -> str:
    """The equation with its output written out and with letters instead of ellipses."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise InvalidInput(f"equation '{equation}' has {len(terms)} terms for {len(ranks)} inputs.")
    if not arrow:
        once = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        output = "..." * ("..." in left) + "".join(once)
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    spare = [c for c in string.ascii_letters if c not in equation][: max(hidden, default=0)]
    names = ["".join(spare[len(spare) - n :]) if "..." in term else "" for term, n in zip(terms, hidden, strict=True)]
    for term, rank, name in zip(terms, ranks, names, strict=True):
        if len(term.replace("...", name)) != rank:
            raise InvalidInput(f"term '{term}' of equation '{equation}' does not fit an input of rank {rank}.")
    filled = [term.replace("...", name) for term, name in zip(terms, names, strict=True)]
    return f"{','.join(filled)}->{output.replace('...', ''.join(spare))}"


@op("Det", since=11)
@in_wide
def det(xp, x):
    return xp.det(x)
