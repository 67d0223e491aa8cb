"""Size: which devices a model needs, before a server exists."""

import msgspec
import streamlit as st

from sojourn.loadgen.search.curve import curve_csv
from sojourn.loadgen.search.predicted import sized_curves
from sojourn.metrics.compute.memory_plan import amount, counted
from sojourn.metrics.compute.model_catalog import bundled_models, find_model
from sojourn.metrics.compute.number_formats import FORMATS, KV_FORMATS
from sojourn.metrics.compute.rank_shape import check_parallel
from sojourn.metrics.errors import InputError, ModelError, ReplayError
from sojourn.metrics.installed import PackageMissing
from sojourn.replay.device.catalogue import catalogue
from sojourn.replay.device.estimate import Deployment
from sojourn.replay.sizing.answer import Question, Sized, refused, sized
from sojourn.replay.sizing.estimates import estimate_for
from sojourn.replay.sizing.load import plain_load
from sojourn.ui.figures.size import latency_by_rate, memory, name_of
from sojourn.ui.markup import fragments, tradeoff
from sojourn.ui.page import caption, draw, stop_with, style
from sojourn.ui.text import markdown, number, percent

MODEL, DEVICES = "Llama-3.1-70B", ["h100_sxm"]
REQUESTS = 3000
STEPS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
BACKENDS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "sojourn": "Sojourn"}


def objectives_of(ttft_ms: int, tpot_ms: int) -> list[dict[str, str | int]]:
    return [{"klass": "all", "ttft_ms": ttft_ms, "tpot_ms": tpot_ms}]


@st.cache_resource(max_entries=64, show_spinner="Simulating …")  # shared, not copied: nobody may change it
def answer_of(
    key: bytes, _deployment: Deployment, prompt: int, output: int, ttft_ms: int, tpot_ms: int, share: float, rate: float
) -> Sized:  # fmt: skip
    """`key` is the deployment."""
    deployment = _deployment
    sizes, known = find_model(deployment.model), catalogue()
    question = Question(
        objectives=objectives_of(ttft_ms, tpot_ms), share=share, rate_rps=rate, has_split=False,
    )  # fmt: skip
    try:
        check_parallel(sizes, deployment.tensor_parallel)
        made = estimate_for(deployment, known)
        load = plain_load(prompt, output, REQUESTS)
        device = known[deployment.device]
        return sized(sizes, load, device, made.estimate, question, None, made.why_roofline)
    except (InputError, ModelError, PackageMissing, ReplayError) as error:
        return refused(deployment, str(error))


style()
st.title("Size", anchor=False)
st.markdown("Which devices a model needs, and how much of a load they serve, before a server exists.")
with st.expander("How to read this page"):
    st.markdown(
        "The engine's scheduler serves requests that come by chance (Poisson) on step times of measured kernels; "
        "without them, on the device's peak rates, and a sentence says so. The **largest rate** keeps both objectives "
        "for the chosen share of requests. **At a time** is how many requests are open there. The **wall** is the "
        "resource that allows least. **$/M** is the price of a million output tokens that come within the objectives. "
        "**Fleet** is how many replicas serve the rate on the right. `sojourn size` sizes scenarios, traces and "
        "recorded runs, too, and corrects the times by a measured point."
    )
left, middle, right = st.columns(3, gap="large")
with left:
    model = st.selectbox("Model", bundled_models(), index=bundled_models().index(MODEL), key="size-model")
    devices = st.multiselect("Devices", list(catalogue()), default=DEVICES, key="size-devices")
    degree = st.select_slider("Devices of a replica", [1, 2, 4, 8], value=4, key="size-tp")
with middle:
    prompt = st.select_slider("Prompt tokens", STEPS, value=1024, key="size-prompt")
    output = st.select_slider("Output tokens", STEPS, value=256, key="size-output")
    rate = st.slider("Requests per second to serve", 1, 200, 20, key="size-rate")
with right:
    ttft = st.slider("TTFT at most (ms)", 50, 5000, 500, step=50, key="size-ttft")
    tpot = st.slider("TPOT at most (ms)", 5, 200, 40, step=5, key="size-tpot")
    share = st.slider("Requests that must keep both (%)", 50, 99, 90, key="size-share")
with st.expander("Formats and server"):
    one, two, three = st.columns(3, gap="large")
    weights = one.selectbox("Weights", ["auto", *FORMATS], index=["auto", *FORMATS].index("fp8"), key="size-weights")
    kv = two.selectbox("Keys and values", list(KV_FORMATS), key="size-kv")
    backend = three.selectbox("Server", list(BACKENDS), format_func=BACKENDS.get, key="size-backend")
if not devices:
    stop_with("Choose a device.", "developer_board")
sizes = find_model(model)
deployments = [
    Deployment(
        model=model, device=device, backend=backend, tensor_parallel=degree, kv_format=kv,
        weight_format=sizes.stored.name if weights == "auto" else weights,
    )
    for device in devices
]  # fmt: skip
answers = [
    answer_of(msgspec.json.encode(each), each, prompt, output, ttft, tpot, share / 100, float(rate))
    for each in deployments
]
st.caption(
    f"{markdown(sizes.name)}: {counted(sizes.parameters)} parameters, {sizes.num_layers} layers. Prompts of {prompt:,} "
    f"tokens, answers of {output:,}."
)
rows = []
for answer in answers:
    best, fleet = answer.best, answer.fleet
    if best is None:
        rows.append([name_of(answer), "refused" if answer.refused else "none keeps them", *[""] * 7])
        continue
    bounds = "" if answer.low is answer.high is None else f" ({number(answer.low or 0.0)} to {number(answer.high)})"
    rows.append([
        name_of(answer), f"{number(best.rate_rps)}{bounds}", number(best.in_flight), number(best.ttft_ms["p90"]),
        number(best.tpot_ms["p90"]), number(best.output_tokens_per_s / answer.deployment.num_devices),
        "" if answer.usd_per_million is None else number(answer.usd_per_million),
        "" if fleet is None or fleet.replicas is None else f"{fleet.replicas:,}", answer.binding or "",
    ])  # fmt: skip
st.html(fragments.table(
    ["replica", "largest req/s", "at a time", "TTFT p90, ms", "TPOT p90, ms", "tokens/s per device", "$/M", "fleet",
     "wall"], rows, right=tuple(range(1, 8)),
))  # fmt: skip
for answer in answers:
    for doubt in [answer.refused] if answer.refused else answer.doubts:
        st.warning(f"{name_of(answer)}: {markdown(doubt)}", icon=":material/info:")
curves = sized_curves(answers, objectives_of(ttft, tpot), share / 100)
draw(*tradeoff.drawing(curves, per_user=True))
st.download_button("Curve as CSV", curve_csv(curves), "curve.csv", "text/csv", icon=":material/download:")
draw("Memory", memory(answers), "One device of each replica. The pool of keys and values gets what is left.")
for title, latency, bound in (("Time per output token", "tpot_ms", tpot), ("Time to first token", "ttft_ms", ttft)):
    draw(title, latency_by_rate(answers, latency, "p90", bound),
         f"A point is a simulated load; a filled one keeps both objectives for {percent(share / 100)} of the requests. "
         "The dashed line is the objective.")  # fmt: skip
for answer in answers:
    if answer.plan is None or answer.refused:
        continue
    st.subheader(name_of(answer), anchor=False)
    st.html(fragments.table(
        ["memory of a device", "", "formula"],
        [[line.name, amount(line.value, line.unit), line.formula] for line in answer.plan.lines], right=(1,),
    ))  # fmt: skip
    st.html(fragments.table(
        ["wall", "requests/s", "formula"],
        [[wall.name, number(wall.requests_per_s), wall.formula] for wall in answer.walls], right=(1,),
    ))  # fmt: skip
    caption(f"Times: {answer.provenance}. Price: {answer.price_source or 'not known'}.")
