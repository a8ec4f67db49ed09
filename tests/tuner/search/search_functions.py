"""Small functions of every kind that models are made of, as the tuner gets them: out of ONNX models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import onnx.parser
from tvm import te, tirx, topi
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from honed.machine.devices import rules_for
from honed.machine.families import FAMILIES
from honed.machine.profile import DeviceIdentity, DeviceLimits, DevicePeaks, DeviceProfile
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.search import rules, traces
from honed.tuner.search.traces import tune_context
from honed.tuner.tune.extract import Extracted, extract

GRAPHS = {
    "dense with bias": """(float[12, 24] x, float[24, 32] w, float[32] b) => (float[12, 32] y) {
        m = MatMul(x, w) y = Add(m, b) }""",
    "dense of 1000 classes": """(float[1, 48] x, float[1000, 48] w, float[1000] b) => (float[1, 1000] y) {
        y = Gemm <transB = 1> (x, w, b) }""",
    "batched matmul": """(float[4, 12, 16] x, float[4, 16, 20] w) => (float[4, 12, 20] y) {
        y = MatMul(x, w) }""",
    "batched matmul of heads": """(float[2, 16, 12, 16] x, float[2, 16, 16, 8] w) => (float[2, 16, 12, 8] y) {
        y = MatMul(x, w) }""",
    "product of odd sizes with bias": """(float[23, 13] x, float[13, 35] w, float[35] b)
        => (float[23, 35] y) {
        m = MatMul(x, w) a = Add(m, b) y = Relu(a) }""",
    "product of odd sizes, transposed": """(float[19, 12] x, float[17, 12] w, float[17] b)
        => (float[19, 17] y) { y = Gemm <transB = 1> (x, w, b) }""",
    "product of odd rows of two heads": """(float[2, 23, 7] x, float[2, 7, 32] w) => (float[2, 23, 32] y) {
        m = MatMul(x, w) y = Sigmoid(m) }""",
    "products of heads where they lie": """(float[2, 12, 64] x, float[2, 2, 12, 12] w)
        => (float[2, 2, 12, 16] y) <int64[4] heads = {2, 12, 4, 16}, int64[2] from = {-1, 2},
        int64[2] to = {-9, 4}, int64[2] axes = {0, 2}, int64[2] steps = {-1, 1}> {
        h = Reshape(x, heads) s = Slice(h, from, to, axes, steps) v = Transpose <perm = [0, 2, 1, 3]> (s)
        y = MatMul(w, v) }""",
    "product of heads that writes rows": """(float[2, 4, 12, 8] w, float[2, 4, 8, 16] v)
        => (float[2, 12, 64] y) <int64[3] rows = {2, 12, 64}> {
        m = MatMul(w, v) t = Transpose <perm = [0, 2, 1, 3]> (m) y = Reshape(t, rows) }""",
    "product and columns of another": """(float[2, 12, 80] x, float[2, 12, 24] z, float[24, 32] w)
        => (float[2, 12, 32] y) <int64[1] from = {48}, int64[1] to = {80}, int64[1] axis = {2}> {
        m = MatMul(z, w) s = Slice(x, from, to, axis) y = Add(m, s) }""",
    "product with packed weights": """(float[1, 64] x) => (float[1, 48] y)
        <int64[3] bytes = {48, 2, 16}, int64[2] blocks = {48, 2}> {
        w = ConstantOfShape <value = uint8[1] {83}> (bytes)
        s = ConstantOfShape <value = float[1] {0.1}> (blocks)
        y = com.microsoft.MatMulNBits <K = 64, N = 48, bits = 4, block_size = 32> (x, w, s) }""",
    "product with packed weights and a residual": """(float[1, 192] x, float[1, 40] r) => (float[1, 40] y)
        <int64[3] bytes = {40, 12, 8}, int64[2] blocks = {40, 12}> {
        w = ConstantOfShape <value = uint8[1] {83}> (bytes)
        s = ConstantOfShape <value = float[1] {0.1}> (blocks)
        m = com.microsoft.MatMulNBits <K = 192, N = 40, bits = 4, block_size = 16> (x, w, s)
        y = Add(m, r) }""",
    "product with packed weights, padded": """(float[1, 1, 96] x, float[1, 1, 40] r) => (float[1, 1, 44] y)
        <int64[3] bytes = {40, 3, 16}, int64[2] blocks = {40, 3}, int64[6] around = {0, 0, 0, 0, 0, 4}> {
        w = ConstantOfShape <value = uint8[1] {83}> (bytes)
        s = ConstantOfShape <value = float[1] {0.1}> (blocks)
        m = com.microsoft.MatMulNBits <K = 96, N = 40, bits = 4, block_size = 32> (x, w, s)
        t = Mul(m, r) y = Pad(t, around) }""",
    "product of rows with packed weights": """(float[12, 64] x) => (float[12, 48] y)
        <int64[3] bytes = {48, 4, 8}, int64[2] blocks = {48, 4}, int64[2] zeros = {48, 2}> {
        w = ConstantOfShape <value = uint8[1] {83}> (bytes)
        s = ConstantOfShape <value = float[1] {0.1}> (blocks)
        z = ConstantOfShape <value = uint8[1] {71}> (zeros)
        m = com.microsoft.MatMulNBits <K = 64, N = 48, bits = 4, block_size = 16> (x, w, s, z)
        y = Relu(m) }""",
    "attention with a mask": """(float[2, 2, 16, 8] q, float[2, 2, 8, 32] k, float[2, 2, 32, 32] v,
        float[2, 1, 1, 32] mask) => (float[2, 2, 16, 32] y) <float root = {0.35}> {
        p = MatMul(q, k) s = Mul(p, root) m = Add(s, mask) w = Softmax <axis = -1> (m) y = MatMul(w, v) }""",
    "attention that writes rows": """(float[2, 4, 12, 8] q, float[2, 4, 8, 20] k, float[2, 4, 20, 16] v)
        => (float[2, 12, 64] y) <int64[3] rows = {2, 12, 64}> {
        p = MatMul(q, k) w = Softmax <axis = -1> (p) m = MatMul(w, v)
        t = Transpose <perm = [0, 2, 1, 3]> (m) y = Reshape(t, rows) }""",
    "attention of one query": """(float[1, 2, 3, 16] q, float[1, 2, 33, 16] k, float[1, 2, 33, 64] v,
        int64 first) => (float[1, 2, 3, 64] y) <float low = {-1e30}, int64 from = {0}, int64 to = {33},
        int64 step = {1}> {
        rows = Range(from, to, step) seen = LessOrEqual(rows, first) t = Transpose <perm = [0, 1, 3, 2]> (k)
        p = MatMul(q, t) m = Where(seen, p, low) w = Softmax <axis = -1> (m) y = MatMul(w, v) }""",
    "norm and a product of its row": """(float[1, 72] x, float[72] g, float[72, 40] w) => (float[1, 40] y) {
        n = SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001> (x, g) y = MatMul(n, w) }""",
    "norm and two products of its row": """(float[1, 72] x, float[72] g, float[72, 40] v, float[72, 40] w)
        => (float[1, 40] y) { n = SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001> (x, g)
        p = MatMul(n, v) s = Sigmoid(p) q = MatMul(n, w) y = Mul(s, q) }""",
    "two products of a row with packed weights": """(float[1, 64] x) => (float[1, 48] y)
        <int64[3] bytes = {48, 2, 16}, int64[2] blocks = {48, 2}> {
        v = ConstantOfShape <value = uint8[1] {83}> (bytes)
        w = ConstantOfShape <value = uint8[1] {38}> (bytes)
        s = ConstantOfShape <value = float[1] {0.1}> (blocks)
        p = com.microsoft.MatMulNBits <K = 64, N = 48, bits = 4, block_size = 32> (x, v, s) t = Tanh(p)
        q = com.microsoft.MatMulNBits <K = 64, N = 48, bits = 4, block_size = 32> (x, w, s)
        y = Mul(t, q) }""",
    "convolution 3x3": """(float[1, 6, 13, 13] x, float[16, 6, 3, 3] w, float[16] b)
        => (float[1, 16, 13, 13] y) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w, b) y = Relu(c) }""",
    "convolution, strided, with a shortcut": """(float[2, 3, 16, 16] x, float[8, 3, 3, 3] w, float[8] b,
        float[2, 8, 8, 8] z) => (float[2, 8, 8, 8] y) {
        c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w, b) a = Add(c, z) y = Sigmoid(a) }""",
    "convolution 5x5 of odd images": """(float[1, 4, 11, 15] x, float[6, 4, 5, 5] w)
        => (float[1, 6, 7, 11] y) { y = Conv (x, w) }""",
    "convolution, dilated, of wide images": """(float[1, 5, 3, 35] x, float[8, 5, 3, 3] w, float[8] b)
        => (float[1, 8, 3, 35] y) {
        c = Conv <pads = [2, 2, 2, 2], dilations = [2, 2]> (x, w, b) y = Relu(c) }""",
    "convolution, grouped": """(float[1, 8, 8, 8] x, float[16, 4, 3, 3] w) => (float[1, 16, 8, 8] y) {
        y = Conv <group = 2, pads = [1, 1, 1, 1]> (x, w) }""",
    "convolution, padded after 3x3": """(float[1, 4, 8, 8] x, float[8, 4, 3, 3] w, float[8] b)
        => (float[1, 8, 10, 10] y) <int64[8] around = {0, 0, 1, 1, 0, 0, 1, 1}> {
        c = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu(c) y = Pad(r, around) }""",
    "convolution, padded after": """(float[1, 8, 12, 12] x, float[16, 8, 1, 1] w, float[16] b)
        => (float[1, 16, 14, 14] y) <int64[8] around = {0, 0, 1, 1, 0, 0, 1, 1}> {
        c = Conv(x, w, b) r = Relu(c) y = Pad(r, around) }""",
    "convolution 1x1": """(float[1, 12, 12, 12] x, float[20, 12, 1, 1] w, float[20] b)
        => (float[1, 20, 12, 12] y) {
        c = Conv(x, w, b) s = Sigmoid(c) y = Mul(c, s) }""",
    "convolution 1x1 of odd images, with a shortcut": """(float[1, 12, 6, 7] x, float[20, 12, 1, 1] w,
        float[20] b, float[1, 20, 6, 7] z) => (float[1, 20, 6, 7] y) {
        c = Conv(x, w, b) a = Add(c, z) y = Relu(a) }""",
    "convolution 1x1 of two odd images": """(float[2, 8, 3, 14] x, float[16, 8, 1, 1] w)
        => (float[2, 16, 3, 14] y) { y = Conv (x, w) }""",
    "convolution, strided, of rows that end with a vector": """(float[1, 3, 16, 16] x, float[8, 3, 3, 3] w)
        => (float[1, 8, 7, 7] y) { y = Conv <strides = [2, 2]> (x, w) }""",
    "convolution along one axis": """(float[1, 6, 40] x, float[16, 6, 3] w, float[16] b)
        => (float[1, 16, 40] y) { c = Conv <pads = [1, 1]> (x, w, b) y = Relu(c) }""",
    "convolution of a sound": """(float[1, 1, 640] x, float[34, 1, 40] w) => (float[1, 34, 31] y) {
        y = Conv <strides = [20]> (x, w) }""",
    "depthwise convolution": """(float[1, 16, 13, 13] x, float[16, 1, 3, 3] w) => (float[1, 16, 7, 7] y) {
        y = Conv <group = 16, pads = [1, 1, 1, 1], strides = [2, 2]> (x, w) }""",
    "depthwise convolution with a sigmoid": """(float[1, 16, 7, 13] x, float[16, 1, 3, 3] w, float[16] b)
        => (float[1, 16, 7, 13] y) {
        c = Conv <group = 16, pads = [1, 1, 1, 1]> (x, w, b) s = Sigmoid(c) y = Mul(c, s) }""",
    "convolution 1x1 of rows of vectors": """(float[1, 12, 4, 16] x, float[16, 12, 1, 1] w)
        => (float[1, 16, 4, 16] y) { y = Conv(x, w) }""",
    "convolution 1x1 of a single row": """(float[1, 12, 1, 20] x, float[32, 12, 1, 1] w)
        => (float[1, 32, 1, 20] y) { y = Conv(x, w) }""",
    "convolutions in blocks of channels": """(float[1, 6, 13, 13] x) => (float[1, 40, 13, 13] y)
        <int64[4] of = {16, 6, 3, 3}, int64[4] each = {16, 1, 3, 3}, int64[4] to = {24, 16, 1, 1}> {
        u = ConstantOfShape <value = float[1] {0.1}> (of) v = ConstantOfShape <value = float[1] {0.3}> (each)
        w = ConstantOfShape <value = float[1] {0.2}> (to) a = Conv <pads = [1, 1, 1, 1]> (x, u) b = Relu(a)
        c = Conv <group = 16, pads = [1, 1, 1, 1]> (b, v) d = Conv(c, w) e = Sigmoid(d)
        y = Concat <axis = 1> (c, e) }""",
    "depthwise and pointwise convolution": """(float[1, 6, 13, 13] x) => (float[1, 40, 13, 13] y)
        <int64[4] of = {16, 6, 3, 3}, int64[4] each = {16, 1, 3, 3}, int64[4] to = {40, 16, 1, 1}> {
        u = ConstantOfShape <value = float[1] {0.1}> (of) v = ConstantOfShape <value = float[1] {0.3}> (each)
        w = ConstantOfShape <value = float[1] {0.2}> (to) a = Conv <pads = [1, 1, 1, 1]> (x, u) b = Relu(a)
        c = Conv <group = 16, pads = [1, 1, 1, 1]> (b, v) s = Sigmoid(c) m = Mul(c, s) d = Conv(m, w)
        y = Relu(d) }""",
    "pooling": """(float[1, 8, 13, 13] x) => (float[1, 8, 6, 6] y) {
        y = MaxPool <kernel_shape = [3, 3], strides = [2, 2]> (x) }""",
    "softmax": "(float[3, 7, 20] x) => (float[3, 7, 20] y) { y = Softmax <axis = -1> (x) }",
    "softmax of long rows": "(float[2, 8, 96] x) => (float[2, 8, 96] y) { y = Softmax <axis = -1> (x) }",
    "log-softmax of columns": """(float[2, 12, 40] x) => (float[2, 12, 40] y) {
        y = LogSoftmax <axis = -2> (x) }""",
    "layer norm with gelu": """(float[6, 48] x, float[48] s, float[48] b) => (float[6, 48] y)
        <float root = {1.4142135}, float one = {1.0}, float half = {0.5}> {
        n = LayerNormalization <axis = -1> (x, s, b)
        d = Div(n, root) e = Erf(d) p = Add(e, one) g = Mul(n, p) y = Mul(g, half) }""",
    "transpose": """(float[5, 13, 8] x) => (float[8, 5, 13] y) {
        y = Transpose <perm = [2, 0, 1]> (x) }""",
    "concatenation": """(float[4, 6] p, float[4, 10] q) => (float[4, 16] y) {
        y = Concat <axis = 1> (p, q) }""",
    "product of two": """(float[2] p, float[2] q) => (float[1] y) {
        m = Mul(p, q) y = ReduceProd <axes = [0]> (m) }""",
    "products of pairs": """(float[50, 2] p, float[50, 2] q) => (float[50] y) {
        m = Mul(p, q) y = ReduceProd <axes = [1], keepdims = 0> (m) }""",
    "place of the largest": """(float[6, 40] x) => (int64[6, 1] y) {
        y = ArgMax <axis = 1> (x) }""",
    "mean of images": """(float[1, 10, 7, 7] x) => (float[1, 10, 1, 1] y) { y = GlobalAveragePool(x) }""",
}


def tasks(name: str, folder: Path, profile: DeviceProfile) -> list[Extracted]:
    """The tasks of a graph, with 32-bit indices as the search has them."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g {GRAPHS[name]}'
    )
    path = folder / "model.onnx"
    onnx.save(model, path)
    found = extract(path, {}, "fp32", profile).tasks
    return [Extracted(one.task, narrow_indices(one.func)) for one in found]


def profile_of(family: str, device: DeviceProfile) -> DeviceProfile:
    """The profile of a device of the family; peaks are beyond what any device reaches."""
    limits: DeviceLimits = device.limits
    if not FAMILIES[family].processor:
        limits = replace(
            limits,
            max_work_group_size=1024,
            max_work_item_sizes=(1024, 1024, 64 if family == "gpu" else 1024),
            local_mem_bytes=32 << 10,
        )
    peaks = DevicePeaks(fp32_gflops=1e6, fp16_gflops=None, bandwidth_gbs=1e6, launch_us=0.1)
    return replace(device, limits=limits, rules=rules_for(FAMILIES[family], limits), peaks=peaks)


def imagined(family: str, threads: int = 1024, *, fp16: bool = True) -> DeviceProfile:
    """A device that is not there: nothing is run here."""
    limits = DeviceLimits(
        compute_units=4,
        max_work_group_size=threads,
        max_work_item_sizes=(threads, threads, threads),
        local_mem_bytes=32 << 10,
        global_mem_bytes=4 << 30,
        max_alloc_bytes=1 << 30,
        base_align_bytes=128,
        fp16=fp16,
        fp64=False,
        int8_dots=False,
        host_unified=True,
    )
    return DeviceProfile(
        identity=DeviceIdentity(platform="p", vendor="v", name="n", driver_version="1", kernel_driver=""),
        limits=limits,
        rules=rules_for(FAMILIES[family], limits),
        peaks=DevicePeaks(fp32_gflops=1e3, fp16_gflops=None, bandwidth_gbs=1e2, launch_us=1.0),
    )


def dense(m: int, n: int, k: int, dtype: str = "float32") -> tirx.PrimFunc:
    a, b = te.placeholder((m, k), dtype, name="a"), te.placeholder((k, n), dtype, name="b")
    return te.create_prim_func([a, b, topi.matmul(a, b)])


def draws(
    func: tirx.PrimFunc,
    profile: DeviceProfile,
    space: Sequence[Schedule],
    count: int,
    postprocs: Sequence[ms.Postproc] | None = None,
) -> list[Schedule]:
    """Random schedules out of a space, as the search would make them; fewer where most draws are refused."""
    found = rules.postprocs(profile) if postprocs is None else list(postprocs)
    generator = ms.space_generator.ScheduleFn(
        lambda _schedule: None, sch_rules=[], postprocs=found, mutator_probs={}
    )
    strategy = ms.search_strategy.ReplayTrace(max_fail_count=50)
    context = tune_context(
        traces.as_module(func), target_for(profile), generator, strategy, seed=11, threads=1
    )
    context.pre_tuning(count, count, list(space), ms.database.MemoryDatabase(), ms.cost_model.RandomModel())
    return [candidate.sch for candidate in context.generate_measure_candidates() or []]
