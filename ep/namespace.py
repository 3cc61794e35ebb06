"""What is `xp`: the array-namespace contract that every lowering is written against.

`xp` is NumPy's dialect as NumPy, `jax.numpy` and `mlx.core` share it (`add`, `where`, `reshape`, `concatenate`,
`take`, `einsum`, `fft.fft`, …; array methods only `x.shape`, `x.ndim`, `x.size`, operators and indexing by
ints, slices, `None` and `...`), plus the names below, which each library lacks or does differently.
`ep/host_namespace.py`, `backends/jax/namespace.py` and `backends/mlx/namespace.py` define all of them.

Rules that make one text serve three libraries:

- dtypes are NumPy dtypes (`np.float32`, `ml_dtypes.bfloat16`); ask `xp.dtype_of(x)`, never `x.dtype`.
- scalars are Python numbers (weak in all three libraries), never NumPy scalars, which leave the device.
- no implicit promotion between arrays: cast with `xp.astype`. JAX runs under strict promotion in the tests.
- no in-place writes, no reading of contents (no `bool(x)`, `int(x)`, `x.item()`) of anything but `Host` inputs.
"""

EXTRAS: dict[str, str] = {
    # conversion
    "asarray": "asarray(x, dtype=None): array of the namespace from a NumPy array, number or array; exact or an error",
    "to_numpy": "to_numpy(x): NumPy array; inside a trace raises ep.program.Untraceable",
    "astype": "astype(x, dtype): C-like conversion to a NumPy dtype (float→int truncates)",
    "dtype_of": "dtype_of(x): NumPy dtype of an array of the namespace",
    "bitcast": "bitcast(x, dtype): the same bytes as another dtype of equal width",
    "contiguous": "contiguous(x): x, row-major in memory where that means something",
    # elementwise and reductions that the libraries lack or name differently
    "divide": "divide(a, b): rounded correctly (the operator / of a library may not be, when b is broadcast)",
    "erf": "erf(x)",
    "sigmoid": "sigmoid(x), exact in x's dtype",
    "rsqrt": "rsqrt(x)",
    "fmod": "fmod(a, b) of floats: the sign is that of a",
    "softmax": "softmax(x, axis): statistics in float32 at least, result in x's dtype",
    "logsumexp": "logsumexp(x, axis, keepdims)",
    "sum": "sum(x, axis, dtype=None, keepdims=False): keeps x's dtype (ONNX), never widens; likewise prod, cumsum",
    "matmul": "matmul(a, b, dtype=None) for all numeric dtypes, integers exactly; dtype is the result's",
    "int8_factor": "int8_factor(b): an int8 matrix in the form that matmul(a, b, int32) multiplies fastest",
    "attention": "attention(q, k, v, scale, mask=None, sink=None): softmax(q kᵀ scale + mask) v over [B, H, L, D] in "
    "one kernel, or NotImplemented; heads of q may share those of k and v; mask bool or additive; where it leaves "
    "no key the result is anything; sink is one more logit per head, without value",
    "det": "det(x): determinants of the matrices in the last two axes",
    "inv": "inv(x): inverses of the matrices in the last two axes",
    "any_bits": "any_bits(x, axis): the bits that are set in any of the integers along an axis",
    "argmax": "argmax(x, axis, keepdims=False) → int64, first index wins; likewise argmin",
    # order
    "argsort": "argsort(x, axis, descending=False) → int64, stable",
    "topk": "topk(x, k, axis, largest=True) → values, int64 indices, sorted, lower index first among ties",
    # indexing
    "take": "take(x, indices, axis): indices in [-n, n)",
    "take_along_axis": "take_along_axis(x, indices, axis)",
    "scatter": "scatter(x, index, updates, reduction='none'): index is a tuple of integer arrays/slices as in "
    "NumPy's x[index] = updates; reduction none|add|mul|max|min",
    "slice_update": "slice_update(x, update, starts): update written at the given start per axis (ints or 0-d arrays)",
    "pad": "pad(x, [(before, after), …], mode='constant'|'edge'|'reflect'|'wrap', constant_values=0)",
    # windows
    "conv": "conv(x, w, strides, pads, dilations, groups): x [N,C,*S], w [O,C/g,*K], pads [(lo, hi)] per spatial axis",
    "conv_transpose": "conv_transpose(x, w, strides, pads, dilations, groups, output_padding): w [C,O/g,*K]",
    "windows": "windows(x, kernel, strides, dilations): [N,C,*S] → [N,C,*out,*kernel] view of (already padded) x",
    "pool": "pool(x, kernel, strides, dilations, kind): kind max|min|sum over windows of (already padded) x",
    # control flow
    "scan": "scan(f, carry, xs, length=None, reverse=False): f(carry, x) → (carry, y), as jax.lax.scan; carry, xs, "
    "y are tuples of arrays (xs may be ())",
    "while_loop": "while_loop(cond, body, carry), as jax.lax.while_loop; Untraceable where the library cannot trace it",
    "rolled_loops": "rolled_loops(): whether a trace is under way whose library compiles scan and while_loop as loops",
    "cond": "cond(c, then, otherwise): the tuple that one of two functions of no arguments gives; a trace that cannot "
    "hold both raises Untraceable",
    # derivatives
    "vjp": "vjp(f, xs): the derivatives of the sum of all elements of f(*xs) by each x",
    # random
    "random_uniform": "random_uniform(shape, seed, low, high, dtype); seed is an int or a 0-d array",
    "random_normal": "random_normal(shape, seed, mean, scale, dtype)",
}
