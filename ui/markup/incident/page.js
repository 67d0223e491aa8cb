// The page: bounds, goodput, the curve of scaled bounds, the timeline, and the ledger of one request.
(() => {
  const found = (name) => document.getElementById(`sojourn-${name}`);
  const run = JSON.parse(found("run").textContent), second = found("run-other") && JSON.parse(found("run-other").textContent);
  const element = (tag, text = "", name = "") => {
    const made = document.createElement(tag);
    made.textContent = text; made.className = name;
    return made;
  };
  const short = (value) => (value === null ? "–" : value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));
  const percent = (share) => `${(100 * share).toFixed(share > 0.99 || share < 0.1 ? 1 : 0)}%`;
  const bounds = run.objectives.map((own) => ({ ...own }));
  // A class of the other run is judged by the bounds of the class of that name here, if there is one.
  const boundsOf = (side) => (side === run ? bounds
    : side.classes.map((name, k) => bounds[run.classes.indexOf(name)] || side.objectives[k]));
  const sides = second ? [run, second] : [run], timelines = [];

  const table = (head, rows) => {
    const made = element("table", "", "sj-table"), top = made.createTHead().insertRow(), body = made.createTBody();
    head.forEach((name) => top.append(element("th", name)));
    rows.forEach((cells) => { const row = body.insertRow(); cells.forEach((cell) => { row.insertCell().textContent = cell; }); });
    return made;
  };

  const judge = () => {
    const good = sides.map((side) => sojourn.judge(side, boundsOf(side)));
    const rows = sides.map((side, s) => sojourn.goodput(side, good[s]));
    found("goodput").replaceChildren(table(
      [...(second ? ["run"] : []), "class", "good / sent", "share", "good req/s", "good tok/s"],
      rows.flatMap((own, s) => own.map((row) => [...(second ? ["AB"[s]] : []), row.name, `${row.good} / ${row.sent}`,
        percent(row.share), short(row.rps), short(row.tokens)]))));
    curve();
    timelines.forEach((timeline, s) => timeline.show(good[s]));
    [window.sojournJudged, window.sojournOther] = rows; // for tests and for the console
  };

  const slider = (klass, name) => {
    const label = element("label", `${run.classes[klass] || "all"} · ${sojourn.objectives[name]}`);
    const range = element("input"), field = element("input");
    const most = Math.max(sojourn.largest(run, klass, name), bounds[klass][name] || 0, 1) * 1.3, least = most / 10000;
    Object.assign(range, { type: "range", min: 0, max: 1000, step: 1 });
    Object.assign(field, { type: "number", min: 0, step: "any" });
    field.setAttribute("aria-label", `bound in ms: ${label.textContent}`);
    range.setAttribute("aria-label", label.textContent);
    const toRange = (ms) => Math.round((1000 * Math.log(Math.max(ms, least) / least)) / Math.log(most / least));
    const set = (ms) => { if (ms > 0) bounds[klass][name] = ms; else delete bounds[klass][name]; };
    const show = () => { field.value = bounds[klass][name] || ""; range.value = bounds[klass][name] ? toRange(bounds[klass][name]) : 1000; };
    range.addEventListener("input", () => { set(Number((least * (most / least) ** (range.value / 1000)).toPrecision(3))); show(); judge(); });
    field.addEventListener("input", () => { set(Number(field.value)); range.value = bounds[klass][name] ? toRange(bounds[klass][name]) : 1000; judge(); });
    show();
    const row = element("div", "", "sj-bound");
    row.append(label, range, field, element("span", "ms"));
    return row;
  };

  const curve = () => {
    const canvas = found("curve"), ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = 190;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d"), style = getComputedStyle(canvas);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "12px sans-serif"; pen.fillStyle = style.getPropertyValue("--sj-muted"); pen.strokeStyle = style.getPropertyValue("--sj-line-strong");
    const left = 48, low = height - 24, scales = [...Array(41).keys()].map((k) => 2 ** (k / 10 - 2));
    const x = (scale) => left + ((Math.log2(scale) + 2) / 4) * (width - left - 12), y = (share) => 8 + (1 - share) * (low - 8);
    [0, 0.5, 1].forEach((share) => {
      pen.beginPath(); pen.moveTo(left, y(share)); pen.lineTo(width - 12, y(share)); pen.stroke();
      pen.textAlign = "right"; pen.fillText(`${100 * share}%`, left - 6, y(share) + 4);
    });
    [0.25, 0.5, 1, 2, 4].forEach((scale) => { pen.textAlign = "center"; pen.fillText(scale === 1 ? "bounds as set" : `× ${scale}`, Math.min(x(scale), width - 20), height - 6); });
    pen.strokeStyle = style.getPropertyValue("--sj-ink"); pen.lineWidth = 2; pen.beginPath();
    scales.forEach((scale) => { const share = sojourn.goodput(run, sojourn.judge(run, bounds, scale))[0].share; pen.lineTo(x(scale), y(share)); });
    pen.stroke();
  };

  const blamed = (run, i) => run.groups
    .map((name, k) => [name || "(no class)", run.blame[k][i] || 0]).filter(([, ms]) => ms >= 0.1).sort((a, b) => b[1] - a[1]);

  const hover = (run, i, event) => {
    const box = found("hover");
    box.hidden = i < 0;
    if (i < 0) return;
    const lines = [`${run.id[i]} · ${run.classes[run.klass[i]] || "no class"} · ${run.status[i]}`,
      `TTFT ${short(run.ttft_ms[i])} ms · TPOT ${short(run.tpot_ms[i])} ms · end to end ${short(run.e2e_ms[i])} ms`];
    const who = blamed(run, i).slice(0, 3).map(([name, ms]) => `${name} ${short(ms)} ms`).join(", ");
    lines.push(run.groups.length ? `delayed by requests of: ${who || "nobody"}` : "no server recorded who delayed it");
    box.replaceChildren(...lines.map((line) => element("div", line)));
    box.style.left = `${Math.min(event.pageX + 14, document.documentElement.clientWidth - 380)}px`;
    box.style.top = `${event.pageY + 14}px`;
  };

  const ledger = (run, i) => {
    const place = found("ledger");
    timelines.forEach((timeline, s) => timeline.choose(sides[s] === run ? i : -1));
    if (i < 0) { place.replaceChildren(); return; }
    found("request").value = run.id[i];
    const parts = run.accounts.map((name, k) => [name, run.ledger[k][i], run.account_colours[k]]).filter(([, ms]) => ms !== null && Math.abs(ms) >= 0.005);
    const whole = parts.reduce((sum, [, ms]) => sum + ms, 0), bars = element("div", "", "sj-waterfall");
    let before = 0;
    parts.forEach(([name, ms, colour]) => {
      const row = element("div"), track = element("div", "", "sj-track"), bar = element("span");
      bar.style.cssText = `left:${(100 * before) / whole}%;width:${Math.max(0.15, (100 * ms) / whole)}%;background:${colour}`;
      track.append(bar); row.append(element("span", name), track, element("span", `${short(ms)} ms`, "sj-right"), element("span", percent(ms / whole), "sj-right"));
      bars.append(row); before += ms;
    });
    const whose = second ? ` in ${"AB"[sides.indexOf(run)]}` : "";
    const title = element("h4", `Ledger of ${run.id[i]}${whose}: ${short(whole)} ms of ${short(run.e2e_ms[i])} ms`);
    const rows = blamed(run, i).map(([name, ms]) => [name, `${short(ms)} ms`]);
    place.replaceChildren(title, parts.length ? bars : element("p", "No ledger was recorded for this request."),
      ...(rows.length ? [element("h4", "Delayed by"), table(["requests of class", "for"], rows)] : []));
  };

  const build = () => {
    run.classes.forEach((_, klass) => Object.keys(sojourn.objectives).forEach((name) => {
      if (sojourn.largest(run, klass, name) > 0) found("bounds").append(slider(klass, name));
    }));
    const legend = (side, place) => side.classes.forEach((name, k) => {
      const item = element("span", name || "(no class)"), mark = element("i");
      const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
      mark.style.background = (dark ? side.dark_colours : side.colours)[k]; item.prepend(mark); place.append(item);
    });
    legend(run, found("legend"));
    if (second) {
      found("sides").classList.add("sj-two");
      ["name", "other-name"].forEach((place, s) => {
        found(place).textContent = `${"AB"[s]} · ${sides[s].name}: ${sides[s].id.length.toLocaleString("en")} requests`;
      });
      found("name").hidden = found("other").hidden = false;
      found("name").after(found("legend"));
      legend(second, found("other-legend"));
    }
    const longest = Math.max(...sides.map(sojourn.lasts));
    sides.forEach((side, s) => {
      const prefix = s ? "other-" : "";
      timelines.push(sojourn.timeline(side, found(`${prefix}timeline`), found(`${prefix}steps`),
        (i, event) => hover(side, i, event), (i) => ledger(side, i), longest,
        (from, to) => timelines.forEach((timeline, k) => { if (k !== s) timeline.follow(from, to); })));
    });
    judge();
    const slowest = run.e2e_ms.reduce((most, value, i) => ((value || 0) > (run.e2e_ms[most] || 0) ? i : most), 0);
    ledger(run, slowest);
    found("requests").append(...run.id.slice(0, 2000).map((id) => { const option = element("option"); option.value = id; return option; }));
    found("request").addEventListener("change", (event) => {
      const side = sides.find((each) => each.id.includes(event.target.value.trim()));
      if (side) ledger(side, side.id.indexOf(event.target.value.trim()));
    });
    window.sojournDrawn = performance.now();
  };
  build();
  const copy = found("copy");
  if (copy) copy.addEventListener("click", async () => {
    const text = found("summary").textContent.replaceAll("&lt;", "<");
    try { await navigator.clipboard.writeText(text); copy.textContent = "Copied"; } catch {
      const area = element("textarea", text); document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
      copy.textContent = "Copied";
    }
  });
})();
