// Charts of goodput, TTFT, TPOT and ITL below Locust's own, on its tab "Charts", and a line on every tab that says how the
// run ended. Locust's page has no place for either, so they are added to its document. What a replay has no use for is
// hidden: users and ramp-up.
(() => {
  const CHARTS = [
    ["Requests that ended, and goodput (per second)", { ended_rps: "ended", good_rps: "goodput: met the SLO" }],
    ["TTFT of the last 10 s (ms)", { ttft50: "p50", ttft90: "p90" }],
    ["TPOT of the last 10 s (ms)", { tpot50: "p50", tpot90: "p90" }],
    ["ITL of the last 10 s (ms)", { itl50: "p50", itl99: "p99" }],
    ["Output tokens per second", { tokens_per_s: "tokens" }],
  ];
  const COLOURS = ["#0099ff", "#00ca5a"];
  const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [1000, 260, 60, 30, 14];
  const replays = (window.templateArgs.sojourn || {}).replays;

  const short = (value) => (value >= 100 ? Math.round(value) : Number(value.toPrecision(3)));
  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

  function niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return power * [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((part) => part * power >= least * 0.9999);
  }

  function drawing(title, lines, points) {
    const values = points.flatMap((point) => Object.keys(lines).map((key) => point[key])).filter((value) => value !== null);
    const step = niceStep(Math.max(...values, 1e-9) / 4), most = 4 * step;
    const [begin, end] = [points[0].time, Math.max(points[points.length - 1].time, points[0].time + 1)];
    const x = (time) => LEFT + ((time - begin) / (end - begin)) * (WIDTH - LEFT - 10);
    const y = (value) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - BOTTOM - TOP);
    let svg = "";
    for (let part = 0; part <= 4; part++) {
      const value = (most * part) / 4, time = begin + ((end - begin) * part) / 4;
      svg += `<line x1="${LEFT}" x2="${WIDTH - 10}" y1="${y(value)}" y2="${y(value)}" stroke="currentColor" opacity="0.2"/>`;
      svg += `<text x="${LEFT - 8}" y="${y(value) + 4}" text-anchor="end">${short(value)}</text>`;
      svg += `<text x="${x(time)}" y="${HEIGHT - 8}" text-anchor="${part === 4 ? "end" : part ? "middle" : "start"}">${clock(time)}</text>`;
    }
    Object.keys(lines).forEach((key, place) => {
      let path = "", open = false;
      for (const point of points) {
        if (point[key] === null) { open = false; continue; }
        path += `${open ? "L" : "M"}${x(point.time).toFixed(1)} ${y(point[key]).toFixed(1)}`;
        open = true;
      }
      svg += `<path d="${path}" fill="none" stroke="${COLOURS[place]}" stroke-width="2"/>`;
    });
    const last = points[points.length - 1];
    const legend = Object.entries(lines).map(([key, name], place) =>
      `<span style="color:${COLOURS[place]}">●</span> ${name}: ${last[key] === null ? "–" : short(last[key])}`).join(" &emsp; ");
    return `<h4 style="margin:18px 0 4px">${title}</h4><div style="font-size:14px">${legend}</div>` +
      `<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" width="100%" fill="currentColor" font-size="12" role="img">${svg}</svg>`;
  }

  const banner = document.createElement("div");
  banner.id = "sojourn-message";
  banner.style.cssText = "font:15px sans-serif;padding:10px 24px;color:#fff;overflow-wrap:anywhere";

  const ours = document.createElement("div");
  ours.id = "sojourn-charts";
  ours.style.fontFamily = "sans-serif";

  function placed() {
    const theirs = [...document.querySelectorAll("[_echarts_instance_]")];
    if (!theirs.length) { ours.remove(); return false; }
    if (replays && theirs[2]) theirs[2].style.display = "none"; // the number of users
    const panel = theirs[theirs.length - 1].parentNode;
    if (ours.parentNode !== panel) panel.appendChild(ours);
    ours.style.color = getComputedStyle(document.body).color;
    return true;
  }

  async function refresh() {
    let state;
    try {
      state = await (await fetch("./sojourn/state")).json();
    } catch { return; } // the page outlives its server
    banner.textContent = state.message;
    banner.style.background = state.is_fault ? "#b3261e" : "#2e5f8a";
    if (!state.message) banner.remove();
    else if (!banner.isConnected) document.body.prepend(banner);
    if (placed()) ours.innerHTML = state.points.length
      ? CHARTS.map(([title, lines]) => drawing(title, lines, state.points)).join("") : "";
  }

  function hideUsers() {
    for (const name of ["userCount", "spawnRate"]) {
      for (const field of document.querySelectorAll(`input[name="${name}"]`)) field.closest(".MuiFormControl-root").style.display = "none";
    }
    for (const label of document.querySelectorAll("header p, header button")) {
      if (label.textContent === "Users" && label.parentNode.style.display !== "none") {
        label.parentNode.style.display = "none";
        if (label.parentNode.nextElementSibling) label.parentNode.nextElementSibling.style.display = "none"; // its divider
      }
      if (label.textContent.trim().toLowerCase() === "edit") label.style.display = "none";
    }
  }

  let isOpened = false;
  function openParameters() { // the scenario is one of them
    const summary = [...document.querySelectorAll(".MuiAccordionSummary-root")].find((each) => each.textContent.trim() === "Custom parameters");
    if (summary && !isOpened) { isOpened = true; summary.click(); }
  }

  new MutationObserver(() => {
    if (replays) { hideUsers(); openParameters(); }
    if (!ours.isConnected && placed()) refresh();
  }).observe(document.getElementById("root"), { childList: true, subtree: true });
  setInterval(refresh, 2000);
  refresh();
})();
