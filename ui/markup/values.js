// The values of a figure as a table, made when a reader opens it.
(() => {
  const MOST_ROWS = 1000;
  const KINDS = { f8: Float64Array, f4: Float32Array, i4: Int32Array, u4: Uint32Array, i2: Int16Array, u2: Uint16Array,
                  i1: Int8Array, u1: Uint8Array };
  // Plotly's JSON has numbers as a list, or as base64 with their type and shape.
  const listed = (values) => {
    if (values === undefined || values === null) return [];
    if (values.bdata === undefined) return values;
    const flat = [...new KINDS[values.dtype](Uint8Array.from(atob(values.bdata), (c) => c.charCodeAt(0)).buffer)];
    if (!values.shape) return flat;
    const [rows, columns] = String(values.shape).split(",").map(Number);
    return columns ? Array.from({ length: rows }, (_, k) => flat.slice(k * columns, (k + 1) * columns)) : flat;
  };
  const plain = (text) => String(text ?? "").replaceAll(/<br>/g, ", ").replaceAll(/<[^>]*>/g, "").trim();
  const cell = (value) => {
    if (typeof value !== "number") return plain(value);
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
  };
  const heading = (axis, otherwise) => plain(axis && axis.title && axis.title.text) || otherwise;
  const axisOf = (layout, trace, letter) => layout[`${letter}axis${(trace[`${letter}axis`] || letter).slice(1)}`];

  // Panels of a figure have axes of their own: a table for each, with a column for each trace on the same places.
  const panels = (figure) => {
    const found = new Map();
    figure.data.forEach((trace, k) => {
      const x = listed(trace.x), y = listed(trace.y), lies = trace.orientation === "h";
      const places = lies ? y : x, values = lies ? x : y;
      if (!values.length || trace.type === "heatmap" || trace.meta === "interpolated") return;
      const key = `${trace.xaxis || "x"} ${trace.yaxis || "y"}`;
      if (!found.has(key)) found.set(key, { trace, lies, columns: [] });
      found.get(key).columns.push({ name: plain(trace.name) || `trace ${k + 1}`, places, values });
    });
    return [...found.values()];
  };
  const tableOfPanel = (layout, { trace, lies, columns }) => {
    const [place, value] = lies ? ["y", "x"] : ["x", "y"], across = axisOf(layout, trace, place), up = axisOf(layout, trace, value);
    const same = columns.every((each) => each.places.length === columns[0].places.length
      && each.places.every((at, i) => at === columns[0].places[i]));
    const head = heading(across, place), unit = heading(up, value);
    if (same) {
      const names = columns.length > 1 ? columns.map((each) => each.name) : [unit];
      return { caption: columns.length > 1 ? unit : "", head: [head, ...names],
               rows: columns[0].places.map((at, i) => [at, ...columns.map((each) => each.values[i])]) };
    }
    return { caption: "", head: ["series", head, unit],
             rows: columns.flatMap((each) => each.places.map((at, i) => [each.name, at, each.values[i]])) };
  };
  const tableOfMap = (layout, trace) => ({
    caption: "", head: [heading(axisOf(layout, trace, "y"), ""), ...listed(trace.x)],
    rows: listed(trace.z).map((row, k) => [listed(trace.y)[k], ...row]),
  });
  // Boxes within boxes: `text` is the value of each, and `meta` names the columns of `customdata`.
  const tableOfTree = (trace) => ({
    caption: "", head: ["name", "part of", plain(trace.marker.colorbar.title.text), ...trace.meta],
    rows: trace.labels.map((name, k) => [name, trace.parents[k], trace.text[k], ...trace.customdata[k]]),
  });
  const element = ({ caption, head, rows }) => {
    const box = document.createElement("div"), table = document.createElement("table");
    table.className = "sj-table";
    const top = table.createTHead().insertRow(), body = table.createTBody();
    head.forEach((name) => top.append(Object.assign(document.createElement("th"), { textContent: cell(name) })));
    rows.slice(0, MOST_ROWS).forEach((cells) => {
      const row = body.insertRow();
      cells.forEach((value) => { row.insertCell().textContent = cell(value); });
    });
    const left = rows.length > MOST_ROWS ? `the first ${MOST_ROWS.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows` : "";
    const words = [caption, left].filter(Boolean).join("; ");
    if (words) table.createCaption().textContent = words;
    box.append(table);
    return box;
  };
  window.sojournValues = (figure) => [
    ...panels(figure).map((panel) => tableOfPanel(figure.layout, panel)),
    ...figure.data.filter((trace) => trace.type === "heatmap").map((trace) => tableOfMap(figure.layout, trace)),
    ...figure.data.filter((trace) => trace.type === "icicle").map(tableOfTree),
  ];
  document.querySelectorAll("details.sj-values").forEach((details) => {
    let place = details.previousElementSibling;
    while (place && !place.classList.contains("sj-plot")) place = place.previousElementSibling;
    details.addEventListener("toggle", () => {
      if (!details.open || details.children.length > 1) return;
      details.append(...window.sojournValues(JSON.parse(place.querySelector("script").textContent)).map(element));
    });
  });
})();
