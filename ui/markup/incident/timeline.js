// All requests as bars on one canvas, and the steps below them. Time is ms from the begin of the run.
// `least` is how long the axis is at least; `onView` hears of each move, so that another timeline can follow.
sojourn.lasts = (run) => [run.end, run.due, run.steps.begin].flat().reduce((most, value) => Math.max(most, value || 0), 1);
sojourn.timeline = (run, canvas, stepsCanvas, onHover, onPick, least = 1, onView = () => {}) => {
  // A request takes the first lane that is free when it is due.
  const free = [], lane = run.id.map((_, i) => {
    const end = Math.max(run.due[i], run.end[i] || 0);
    let found = free.findIndex((until) => until <= run.due[i]);
    if (found < 0) found = free.length;
    free[found] = end;
    return found;
  });
  const count = free.length, dark = window.matchMedia("(prefers-color-scheme: dark)");
  const last = Math.max(least, sojourn.lasts(run));
  const view = { from: 0, to: last * 1.01, top: 0, rows: count };
  let good = [], chosen = -1, printing = false;
  const ink = (name) => getComputedStyle(canvas).getPropertyValue(name).trim();
  const prepare = (target) => {
    const ratio = window.devicePixelRatio || 1, width = target.clientWidth, height = Number(target.getAttribute("height"));
    target.width = width * ratio; target.style.height = `${height}px`;
    const pen = target.getContext("2d");
    if (target.dataset.ratio !== `${ratio} ${width}`) { target.height = height * ratio; target.dataset.ratio = `${ratio} ${width}`; }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px sans-serif";
    return [pen, width, height];
  };
  const LEFT = 46, AXIS = 22;
  const place = (ms, width) => LEFT + ((ms - view.from) / (view.to - view.from)) * (width - LEFT - 6);
  const axis = (pen, width, height) => {
    const span = view.to - view.from, rough = span / Math.max(3, width / 120);
    const power = 10 ** Math.floor(Math.log10(rough)), unit = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
    pen.fillStyle = ink("--sj-muted"); pen.strokeStyle = ink("--sj-line"); pen.textAlign = "center";
    for (let at = Math.ceil(view.from / unit) * unit; at <= view.to; at += unit) {
      const x = place(at, width);
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height - AXIS); pen.stroke();
      pen.fillText(`${+(at / 1000).toPrecision(6)} s`, x, height - 6);
    }
  };
  const draw = () => {
    const [pen, width, height] = prepare(canvas), room = height - AXIS, tall = room / view.rows;
    axis(pen, width, height);
    pen.save(); pen.beginPath(); pen.rect(LEFT, 0, width - LEFT, room); pen.clip();
    const thick = Math.max(0.8, Math.min(14, tall * 0.72)), red = ink("--sj-missed");
    const colours = dark.matches && !printing ? run.dark_colours : run.colours;
    for (let i = 0; i < lane.length; i++) {
      if (lane[i] < view.top - 1 || lane[i] > view.top + view.rows) continue;
      const y = (lane[i] - view.top + 0.5) * tall;
      const begin = run.due[i], end = run.end[i] === null ? begin : run.end[i], first = run.first[i] === null ? end : run.first[i];
      if (end < view.from || begin > view.to) continue;
      const a = place(begin, width), b = place(first, width), c = Math.max(place(end, width), a + 1);
      pen.fillStyle = colours[run.klass[i]];
      pen.globalAlpha = 0.35; pen.fillRect(a, y - thick / 2, Math.max(0.5, b - a), thick);
      pen.globalAlpha = 1; pen.fillRect(b, y - thick / 2, Math.max(0.5, c - b), thick);
      if (!good[i]) { pen.fillStyle = red; pen.fillRect(c, y - thick / 2, 3, thick); }
      if (i === chosen) { pen.strokeStyle = ink("--sj-ink"); pen.strokeRect(a - 2, y - thick / 2 - 2, c - a + 7, thick + 4); }
    }
    pen.restore();
    pen.fillStyle = ink("--sj-muted"); pen.textAlign = "right";
    pen.fillText(`${Math.floor(view.top) + 1}`, LEFT - 6, 12);
    pen.fillText(`${Math.min(count, Math.ceil(view.top + view.rows))}`, LEFT - 6, room - 2);
    drawSteps();
  };
  const drawSteps = () => {
    const steps = run.steps;
    stepsCanvas.hidden = !steps.begin.length;
    if (!steps.begin.length) return;
    const [pen, width, height] = prepare(stepsCanvas), room = height - AXIS - 12;
    axis(pen, width, height);
    const columns = Math.max(1, Math.floor(width - LEFT - 6)), prompt = new Float64Array(columns), decode = new Float64Array(columns);
    for (let i = 0; i < steps.begin.length; i++) {
      const x = Math.floor(place(steps.begin[i], width) - LEFT);
      if (x >= 0 && x < columns) { prompt[x] += steps.prompt[i]; decode[x] += steps.decode[i]; }
    }
    let most = 1;
    for (let x = 0; x < columns; x++) most = Math.max(most, prompt[x] + decode[x]);
    for (let x = 0; x < columns; x++) {
      const low = (decode[x] / most) * room, high = (prompt[x] / most) * room;
      pen.fillStyle = "#0072B2"; pen.fillRect(LEFT + x, 12 + room - low, 1, low);
      pen.fillStyle = "#E69F00"; pen.fillRect(LEFT + x, 12 + room - low - high, 1, high);
    }
    pen.fillStyle = ink("--sj-muted"); pen.textAlign = "left";
    const wide = (view.to - view.from) / columns, each = wide >= 1000 ? `${(wide / 1000).toFixed(1)} s` : `${wide.toFixed(1)} ms`;
    pen.fillText(`tokens of steps in ${each}, at most ${Math.round(most).toLocaleString("en")}: blue decode, orange prompts`, LEFT, 9);
  };
  const at = (event) => {
    const box = canvas.getBoundingClientRect(), room = box.height - AXIS;
    const row = Math.floor(view.top + ((event.clientY - box.top) / room) * view.rows), x = event.clientX - box.left;
    if (x < LEFT) return -1;
    return lane.findIndex((own, i) => own === row && place(run.due[i], box.width) - 2 <= x
      && x <= place(Math.max(run.due[i], run.end[i] || 0), box.width) + 4);
  };
  const clamp = () => {
    const span = Math.min(last * 1.01, Math.max(1, view.to - view.from));
    view.from = Math.max(0, Math.min(view.from, last * 1.01 - span)); view.to = view.from + span;
    view.rows = Math.max(Math.min(8, count), Math.min(count, view.rows));
    view.top = Math.max(0, Math.min(view.top, count - view.rows));
  };
  const zoom = (factor, x = 0.5, y = 0.5) => {
    const span = view.to - view.from, rows = view.rows;
    const least = Math.min(8, count), then = Math.max(least, Math.min(count, rows * factor));
    view.from += span * (1 - factor) * x; view.to = view.from + span * factor;
    view.top += (rows - then) * y; view.rows = then;
    clamp(); draw(); onView(view.from, view.to);
  };
  const move = (x, y) => {
    const span = view.to - view.from;
    view.from += x * span; view.to += x * span; view.top += y * view.rows;
    clamp(); draw(); onView(view.from, view.to);
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - box.left - LEFT) / (box.width - LEFT), (event.clientY - box.top) / box.height);
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { held = { x: event.clientX, y: event.clientY, moved: false }; });
  window.addEventListener("pointerup", (event) => {
    if (held && !held.moved && event.target === canvas) onPick(at(event));
    held = null;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held && Math.abs(event.clientX - held.x) + Math.abs(event.clientY - held.y) > 3) {
      const box = canvas.getBoundingClientRect();
      move((held.x - event.clientX) / (box.width - LEFT), (held.y - event.clientY) / (box.height - AXIS));
      held = { x: event.clientX, y: event.clientY, moved: true };
    } else if (!held) onHover(at(event), event);
  });
  canvas.addEventListener("pointerleave", (event) => onHover(-1, event));
  const keys = { "+": () => zoom(0.8), "-": () => zoom(1.25), ArrowLeft: () => move(-0.1, 0), ArrowRight: () => move(0.1, 0),
                 ArrowUp: () => move(0, -0.1), ArrowDown: () => move(0, 0.1), Home: () => zoom(1e9) };
  canvas.addEventListener("keydown", (event) => { if (keys[event.key]) { event.preventDefault(); keys[event.key](); } });
  window.addEventListener("resize", draw);
  window.addEventListener("beforeprint", () => { printing = true; draw(); });
  window.addEventListener("afterprint", () => { printing = false; draw(); });
  dark.addEventListener("change", draw);
  const follow = (from, to) => { Object.assign(view, { from, to }); clamp(); draw(); };
  return { draw, follow, show: (judged) => { good = judged; draw(); }, choose: (i) => { chosen = i; draw(); } };
};
