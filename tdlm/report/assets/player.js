// The denoising player: shows the frames of one trace. Reads the JSON beside it; writes text by textContent only.
"use strict";
(() => {
  const NEWLINE = "\u21b5";
  const make = (tag, css, parent) => {
    const node = document.createElement(tag);
    if (css) node.className = css;
    if (parent) parent.appendChild(node);
    return node;
  };

  function build(root) {
    const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
    const find = (css) => root.querySelector(css);
    const [live, stage, slider, status, inspect] = [".live", ".stage", "input", ".status", ".inspect"].map(find);
    const [play, speed, view, head] = [".play", ".speed", ".view", ".playhead"].map(find);
    const count = data.final.length, last = data.frames.length - 1;
    const starts = new Set(data.words), given = new Set(data.given);
    const cells = [], labels = [];
    let word = null, frame = 0, shown = -1, timer = null, current = -1, touched = false;
    const tiny = new Set(data.final.map((p, i) => [data.pieces[p], i]).filter(([t]) => t.trim().length < 3).map(([, i]) => i));
    const height = new Array(count).fill(-1), piece = new Array(count).fill(0);
    let moved = new Set();

    for (let i = 0; i < count; i++) {
      const text = data.pieces[data.final[i]];
      if (!word || starts.has(i)) {
        if (/^\s/.test(text)) stage.appendChild(document.createTextNode(" "));
        word = make("span", "word", stage);
      }
      const cell = make("span", "piece", word);
      make("span", "room", cell).textContent = text.replace(/\n/g, NEWLINE).trim() || " ";
      labels.push(make("span", "label", cell));
      cell.dataset.place = i;
      cell.tabIndex = i ? -1 : 0;
      cells.push(cell);
      if (text.includes("\n")) { make("br", "", word); word = null; }
    }

    function state(target) {  // from where we stand when going forward, else from the start
      const begin = target < shown || shown < 0 ? 0 : shown + 1;
      for (let f = begin; f <= target; f++) {
        const c = data.frames[f].c;
        for (let j = 0; j < c.length; j += 3) { height[c[j]] = c[j + 1]; piece[c[j]] = c[j + 2]; }
      }
      shown = target;
    }

    function paint() {
      const old = height.slice(), oldPiece = piece.slice(), before = moved, first = shown < 0;
      state(frame);
      moved = new Set(data.frames[frame].m);
      let done = 0;
      for (let i = 0; i < count; i++) {
        if (height[i] === 0) done++;
        if (!first && old[i] === height[i] && oldPiece[i] === piece[i] && before.has(i) === moved.has(i)) continue;
        const text = data.pieces[piece[i]];
        labels[i].textContent = text.replace(/\n/g, NEWLINE).trim();
        cells[i].className = "piece " + (height[i] ? "h" + height[i] : "leaf") + (height[i] === data.top ? " top" : "")
          + (tiny.has(i) ? " tiny" : "") + (given.has(i) ? " given" : "") + (moved.has(i) ? " moved" : "");
        cells[i].title = height[i] ? "one of: " + text : text;
      }
      const f = data.frames[frame];
      slider.value = frame;
      head.style.left = (last ? 100 * frame / last : 0) + "%";
      status.textContent = `${f.e} evaluations \u00b7 ${done} of ${count} decided`;
      slider.setAttribute("aria-valuetext", `step ${frame} of ${last}, ${done} of ${count} positions decided`);
      if (current >= 0) explain(current);
    }

    function explain(i) {
      current = i;
      const path = [];
      let h = -1;
      for (const f of data.frames) {
        for (let j = 0; j < f.c.length; j += 3) {
          if (f.c[j] !== i) continue;
          if (f.c[j + 1] === h) path.pop();
          h = f.c[j + 1];
          path.push([f.e, h, data.pieces[f.c[j + 2]]]);
        }
      }
      inspect.textContent = "";
      make("b", "", inspect).textContent = `Position ${i + 1}: `;
      path.forEach(([e, at, text], n) => {
        if (n) inspect.appendChild(document.createTextNode(" \u2192 "));
        const part = make("span", at === height[i] ? "now" : "", inspect);
        const what = text.replace(/\n/g, NEWLINE).trim() || text;
        part.textContent = at === data.top ? "undecided" : at ? `one of {${what}}` : `\u201c${what}\u201d`;
        if (n) make("small", "", inspect).textContent = ` (evaluation ${e})`;
      });
      if (given.has(i)) inspect.appendChild(document.createTextNode(" (given)"));
    }

    const pause = () => { clearTimeout(timer); timer = null; play.textContent = "Play"; play.setAttribute("aria-label", "Play"); };
    const tick = () => {
      if (frame >= last) return pause();
      frame++;
      paint();
      timer = setTimeout(tick, Math.min(600, Math.max(30, 14000 / (last + 1))) / Number(speed.value));
    };
    const toggle = () => {
      if (timer !== null) return pause();
      if (frame >= last || !touched) { frame = 0; touched = true; paint(); }
      play.textContent = "Pause";
      play.setAttribute("aria-label", "Pause");
      timer = setTimeout(tick, 250);
    };
    const go = (to) => { pause(); touched = true; frame = Math.max(0, Math.min(last, to)); paint(); };

    play.addEventListener("click", toggle);
    find(".back").addEventListener("click", () => go(frame - 1));
    find(".forward").addEventListener("click", () => go(frame + 1));
    slider.addEventListener("input", () => go(Number(slider.value)));
    view.addEventListener("change", () => stage.classList.toggle("grid", view.value === "grid"));
    for (const kind of ["pointerover", "focusin", "click"]) {
      stage.addEventListener(kind, (event) => {
        const cell = event.target.closest(".piece");
        if (cell) explain(Number(cell.dataset.place));
      });
    }
    stage.addEventListener("keydown", (event) => {  // one tab stop; arrows walk through the text
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
      const cell = event.target.closest(".piece");
      if (!by || !cell) return;
      const to = Math.max(0, Math.min(count - 1, Number(cell.dataset.place) + by));
      cell.tabIndex = -1;
      cells[to].tabIndex = 0;
      cells[to].focus();
      event.preventDefault();
      event.stopPropagation();
    });
    root.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || /^(SELECT|INPUT)$/.test(event.target.tagName)) {
        if (event.key !== " " || event.target.tagName !== "INPUT") return;
      }
      const act = { " ": toggle, k: toggle, j: () => go(frame - 1), l: () => go(frame + 1), Home: () => go(0), End: () => go(last) }[event.key];
      if (!act || (event.key === " " && event.target.tagName === "BUTTON")) return;
      event.preventDefault();
      act();
    });

    live.hidden = false;
    root.classList.add("on");
    frame = Math.round(last * 0.7);  // a first look that shows all there is to see
    paint();
  }

  function reveal() {  // a link into a closed part of the page opens it, also where the browser does not
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (!target) return;
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    target.scrollIntoView();
  }

  document.querySelectorAll(".player").forEach(build);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
  addEventListener("hashchange", reveal);
  document.addEventListener("click", (event) => { if (event.target.closest('a[href^="#"]')) setTimeout(reveal); });
  reveal();
})();
