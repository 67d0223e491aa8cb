"use strict";
// Draws each figure of the page when it comes into view, in the reader's theme; all of them before the page is printed.
(() => {
  const dark = JSON.parse(document.getElementById("sojourn-dark").textContent);
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  const A4_WIDTH_PX = 690;
  // Plotly is half a second of work for a browser: it is read when the first figure is to be drawn.
  const needPlotly = () => {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = document.getElementById("sojourn-plotly").textContent;
    document.head.append(script);
  };
  const draw = (place, inTheDark, width) => {
    needPlotly();
    let text = place.querySelector("script").textContent;
    if (inTheDark) {
      for (const [light, other] of Object.entries(dark.ink)) {
        text = text.replaceAll(`"${light}"`, `"${other}"`).replaceAll(`:${light}'`, `:${other}'`);
      }
    }
    const figure = JSON.parse(text);
    if (inTheDark) Object.assign(figure.layout, { paper_bgcolor: dark.paper, plot_bgcolor: dark.paper });
    if (width) figure.layout.width = width;
    Plotly.react(place.querySelector(".plotly-graph-div"), figure.data, figure.layout, dark.config);
    place.dataset.drawn = "yes";
  };
  const places = [...document.querySelectorAll(".sj-plot")];
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target, scheme.matches); }
  }), { rootMargin: "300px" });
  places.forEach((place) => seen.observe(place));
  scheme.addEventListener("change", () => places.filter((place) => place.dataset.drawn).forEach((place) => draw(place, scheme.matches)));
  window.addEventListener("beforeprint", () => places.forEach((place) => draw(place, false, A4_WIDTH_PX)));
  window.addEventListener("afterprint", () => places.forEach((place) => draw(place, scheme.matches)));
  window.sojournDrawAll = () => places.forEach((place) => draw(place, scheme.matches));
})();
