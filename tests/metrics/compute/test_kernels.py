"""What class a kernel is of, whose time is whose, and how far two clocks may be apart."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.metrics.compute.kernels import (
    CLASSES,
    Burst,
    Kernel,
    Packing,
    StepWindow,
    align,
    apart,
    by_class,
    by_name,
    kernel_class,
    kernel_records,
    outermost,
    segments,
    within,
)

TRITON = Path(__file__).parents[3] / "engine" / "compute" / "triton"

FOREIGN = {
    "ampere_sgemm_128x64_tn": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel": "gemm",
    "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x4_tn_align8": "gemm",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)": "gemm",
    "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "gemm",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16>(cublasGemvParams)":
        "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>(Params)": "gemm",
    "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>(Params)": "gemm",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, false, false>>(Params)": "attention",
    "void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>, 4, 1, true>(Params)": "attention",
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>(Params)": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128": "attention",
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits>(Params)": "attention",
    "void vllm::paged_attention_v2_kernel<__nv_bfloat16, 128, 16, 128, 512>(float*)": "attention",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "communication",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(RankData*)": "communication",
    "Memcpy HtoD (Pinned -> Device)": "copy",
    "Memset (Device)": "copy",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>()":
        "copy",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)": "norm",
    "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)": "norm",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)": "rope_kv",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(__nv_bfloat16 const*)": "rope_kv",
    "void at::native::(anonymous namespace)::distribution_elementwise_multinomial<float>(float*)": "sampling",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)": "other",
    "aten::addmm": "gemm", "aten::bmm": "gemm", "aten::rms_norm": "norm", "aten::copy_": "copy",
    "aten::scaled_dot_product_attention": "attention", "aten::embedding": "other",
}  # fmt: skip

OURS = {
    "attend_kernel": "attention", "plan_kernel": "attention",
    "edit_kernel": "sampling", "chunk_kernel": "sampling", "draw_kernel": "sampling",
    "gate_up_kernel": "gemm", "gated_product_kernel": "gemm", "down_kernel": "gemm",
    "expand_kernel": "gemm", "shrink_kernel": "gemm",
    "quantised_product_kernel": "gemm", "int8_product_kernel": "gemm", "round_rows_kernel": "other",
    "norm_kernel": "norm", "heads_kernel": "rope_kv",
    "write_kernel": "rope_kv", "sum_kernel": "other", "gate_kernel": "other", "step_kernel": "other",
}  # fmt: skip


@pytest.mark.parametrize(("name", "klass"), [*FOREIGN.items(), *OURS.items()])
def test_a_name_tells_its_class(name, klass):
    assert kernel_class(name) == klass


def test_every_kernel_of_ours_has_its_place_in_the_table():
    written = {
        node.name
        for path in TRITON.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    }
    assert written == set(OURS)


def run(begin: int, length: int, name: str = "k", klass: str = "gemm") -> Kernel:
    return Kernel(name, klass, begin, begin + length)


kernels = st.lists(
    st.builds(run, st.integers(0, 60), st.integers(0, 20), st.sampled_from("abc"), st.sampled_from(CLASSES[:-1])),
    max_size=12,
).map(lambda runs: sorted(runs, key=lambda run: (run.begin_ns, -run.end_ns)))  # fmt: skip


@given(kernels)
def test_every_moment_belongs_to_the_kernel_that_began_last(runs):
    owner = dict.fromkeys(range(100))
    for place, one in enumerate(runs):
        owner |= dict.fromkeys(range(one.begin_ns, one.end_ns), place)
    # A kernel that ended no longer hides an earlier one that still runs
    for moment in owner:
        running = [place for place, one in enumerate(runs) if one.begin_ns <= moment < one.end_ns]
        owner[moment] = running[-1] if running else None
    told = dict.fromkeys(range(100))
    for place, begin, end in segments(runs):
        assert all(told[moment] is None for moment in range(begin, end)), "told twice"
        told |= dict.fromkeys(range(begin, end), place)
    assert told == owner


@st.composite
def step_windows(draw):
    moments = sorted(draw(st.lists(st.integers(5, 70), min_size=2, max_size=12)))
    pairs = zip(moments[::2], moments[1::2], strict=False)
    return [StepWindow(7 + place, begin, end, end) for place, (begin, end) in enumerate(pairs)]


@given(kernels, step_windows())
def test_the_classes_sum_to_the_wall_time_of_the_burst(runs, windows):
    records = kernel_records(runs, windows)
    classes = by_class(records)
    assert sum(classes.values()) == windows[-1].end_ns - windows[0].begin_ns
    assert set(classes) == set(CLASSES) and all(record.total_ns >= 0 for record in records)
    assert sum(kernel.total_ns for kernel in by_name(records)) == sum(classes.values())
    busy = {moment for one in runs for moment in range(one.begin_ns, one.end_ns)}
    idle = set(range(windows[0].begin_ns, windows[-1].end_ns)) - busy
    assert classes["gap"] == len(idle)


@given(kernels, step_windows(), st.integers(1, 5))
def test_pieces_of_a_burst_give_what_the_whole_gives(runs, windows, size):
    runs = outermost(runs)
    pieces = []
    for first in range(0, len(windows), size):
        rest = windows[first + size :]
        part = [one for one in runs if first == 0 or one.begin_ns >= windows[first].begin_ns]
        until = rest[0].begin_ns if rest else None
        pieces += kernel_records([one for one in part if until is None or one.begin_ns < until],
                                 windows[first : first + size], until)  # fmt: skip
    # A kernel that crosses the border of two pieces is cut there: its rest is a gap, and the sum stays.
    whole = windows[-1].end_ns - windows[0].begin_ns
    assert sum(record.total_ns for record in pieces) == whole
    crossing = sum(1 for one in runs for window in windows[size::size] if one.begin_ns < window.begin_ns < one.end_ns)
    if not crossing:
        assert by_class(pieces) == by_class(kernel_records(runs, windows))


def test_a_burst_without_a_step_has_no_record():
    assert kernel_records([run(0, 5)], []) == []


@given(
    st.integers(-(10**15), 10**18),
    st.lists(st.tuples(st.integers(0, 10**9), *[st.integers(0, 5000)] * 3), min_size=1, max_size=20),
)
def test_a_planted_offset_is_found_within_the_error_that_is_told(offset, marks):
    told = align(
        (at, at + early + offset, at + early + long + offset, at + early + long + late)
        for at, early, long, late in marks
    )
    assert abs(told.ns - offset) <= told.error_ns
    assert told.error_ns <= min(early + late for _, early, _, late in marks) // 2 + 1


def test_clocks_that_drift_are_told_to():
    told = align([(0, 1000, 1000, 10), (10**9, 10**9 + 51_000, 10**9 + 51_000, 10**9 + 10)])
    assert 900 <= told.ns <= 51_100 and told.error_ns >= 24_000


def test_a_clock_without_marks_is_refused():
    with pytest.raises(ValueError):
        align([])


def test_of_nested_operations_the_first_call_stands_for_all():
    nested = [run(0, 10, "aten::linear"), run(2, 5, "aten::addmm"), run(10, 3, "aten::add")]
    assert [one.name for one in outermost(nested)] == ["aten::linear", "aten::add"]
    assert [one.name for one in apart(outermost(nested), [run(0, 11, "span")])] == ["aten::add"]


def test_operations_end_with_the_part_of_a_step_that_their_middle_lies_in():
    windows = [StepWindow(1, 100, 150, 200), StepWindow(2, 200, 260, 260)]  # the second one draws at no cost
    cut = within([run(90, 30), run(95, 9), run(140, 14), run(148, 14), run(190, 18), run(250, 24)], windows)
    assert [(one.begin_ns, one.end_ns) for one in cut] == [(100, 120), (140, 150), (150, 162), (190, 200)]


def test_operations_and_spans_do_not_cross():
    """Two clocks tell of them."""
    spans = [run(0, 10, "one"), run(20, 10, "two")]
    cut = apart([run(8, 5, "early"), run(13, 2, "whole"), run(15, 8, "late"), run(29, 1, "inside")], spans)
    assert [(one.name, one.begin_ns, one.end_ns) for one in cut] == [
        ("early", 10, 13),
        ("whole", 13, 15),
        ("late", 15, 20),
    ]


def test_more_kernels_than_a_trace_holds_are_counted(monkeypatch):
    monkeypatch.setattr("sojourn.metrics.compute.kernels.MAX_TRACED", 3)
    runs = [run(place, 1, "ab"[place % 2]) for place in range(5)]
    packing = Packing()
    packing.add(runs[:2])
    packing.add(runs[2:])
    burst = Burst([], [], packing.names, packing.kernels, packing.dropped, 0, {}, "cpu", "")
    assert burst.dropped == 2 and burst.traced == 3 and list(burst.runs()) == runs[:3]
