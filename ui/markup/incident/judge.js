"use strict";
// Judges stored requests by bounds that a reader moves, as metrics/request/goodput.py does.
const sojourn = {};
sojourn.objectives = { ttft_ms: "time to first token", ttfa_ms: "time to first answer token",
  tpot_ms: "time per output token", e2e_ms: "end-to-end" };

// bounds: for each class {objective: ms}. Returns for each request whether it is good.
sojourn.judge = (run, bounds, scale = 1, apart = run.ttfa_ms.some((ms) => ms !== null)) => run.id.map((_, i) => {
  if (run.status[i] !== "ok") return false;
  const own = bounds[run.klass[i]];
  return Object.keys(own).every((name) => {
    const latency = run[name][i];
    if (latency !== null) return latency <= own[name] * scale;
    // One token has no gap, and what nobody could measure misses nothing
    return name === "tpot_ms" || (name === "ttfa_ms" && !apart);
  });
});

sojourn.goodput = (run, good) => {
  const row = (name, member) => {
    let sent = 0, kept = 0, tokens = 0, told = false;
    for (let i = 0; i < good.length; i++) {
      if (!member(i)) continue;
      sent += 1;
      if (run.tokens[i] !== null) told = true;
      if (good[i]) { kept += 1; tokens += run.tokens[i] || 0; }
    }
    const seconds = run.window_s;
    return { name, sent, good: kept, share: sent ? kept / sent : 0, rps: seconds ? kept / seconds : 0,
             tokens: told && seconds ? tokens / seconds : null };
  };
  const rows = [row("all", () => true)];
  if (run.classes.length > 1) run.classes.forEach((name, k) => rows.push(row(name || "(no class)", (i) => run.klass[i] === k)));
  return rows;
};

sojourn.largest = (run, klass, name) =>
  run[name].reduce((most, value, i) => (run.klass[i] === klass && value !== null ? Math.max(most, value) : most), 0);
