// A tree of thousands of nodes: only opened branches are in the page. Mouse: click a row to open and inspect it.
// Keyboard: Up, Down, Left, Right, Home, End, Enter as in any tree; "/" goes to the search box.
const MOST = 60;
const BLUE = [0, 114, 178], ORANGE = [230, 159, 0];

function render({ model, el }) {
  const d = model.get("nodes");
  const n = d.parent.length;
  const kids = Array.from({ length: n + 1 }, () => []);
  d.parent.forEach((p, i) => kids[p + 1].push(i));
  const open = new Set(), more = new Map();
  let rows = [], active = -1, found = null;

  el.innerHTML = `
    <div style="border:1px solid var(--jp-border-color2,#c8ccd2);border-radius:10px;padding:12px;max-width:860px;
      color:var(--jp-ui-font-color1,inherit);font:13px system-ui,sans-serif">
      <div style="display:flex;gap:12px;flex-wrap:wrap;align-items:center;margin-bottom:8px">
        <label>search <input type="search" aria-label="search the text of all nodes" style="width:220px"></label>
        <label>colour <select aria-label="colour of the nodes"><option value="last">recency</option>
          <option value="hits">hits</option><option value="owner">owner</option></select></label>
        <span role="status"></span>
      </div>
      <div style="display:flex;gap:12px;flex-wrap:wrap">
        <div role="tree" aria-label="prefix tree" tabindex="0" style="flex:3 1 380px;height:380px;overflow:auto;
          border:1px solid var(--jp-border-color2,#c8ccd2);border-radius:6px"></div>
        <div aria-live="polite" aria-label="chosen node" style="flex:2 1 220px;height:380px;overflow:auto;
          overflow-wrap:anywhere"></div>
      </div>
    </div>`;
  const [search, colour] = [el.querySelector("input"), el.querySelector("select")];
  const [status, tree, detail] = ["[role=status]", "[role=tree]", "[aria-live]"].map((q) => el.querySelector(q));
  colour.value = model.get("colour_by");

  const top = { hits: Math.max(1, ...d.hits.slice(0, 1e5)), last: [...new Set(d.last)].sort((a, b) => a - b) };
  const rank = new Map(top.last.map((v, i) => [v, i / Math.max(1, top.last.length - 1)]));
  const shade = (i) => {
    if (colour.value === "owner") return d.colour[i] || "transparent";
    const share = colour.value === "hits" ? Math.log1p(d.hits[i]) / Math.log1p(top.hits) : rank.get(d.last[i]);
    return `rgba(${(colour.value === "hits" ? ORANGE : BLUE).join(",")},${0.08 + 0.72 * share})`;
  };

  function visible() {
    rows = [];
    const stack = [];
    const push = (parent, level) => {
      const all = kids[parent + 1].filter((i) => !found || found.has(i));
      const limit = more.get(parent) || MOST;
      if (all.length > limit) stack.push({ more: parent, count: all.length - limit, level });
      for (const i of all.slice(0, limit).reverse()) stack.push({ id: i, level });
    };
    push(-1, 1);
    while (stack.length && rows.length < 4000) {
      const row = stack.pop();
      rows.push(row);
      if (row.id !== undefined && (open.has(row.id) || (found && found.get(row.id) === "path"))) push(row.id, row.level + 1);
    }
  }

  function paint() {
    visible();
    tree.replaceChildren(...rows.map((row, at) => {
      const line = document.createElement("div");
      line.setAttribute("role", "treeitem");
      line.setAttribute("aria-level", row.level);
      line.id = `${uid}-${at}`;
      line.style.cssText = `padding:3px 6px 3px ${6 + 16 * Math.min(row.level - 1, 20)}px;cursor:pointer;white-space:nowrap;
        display:flex;align-items:center`;
      if (row.more !== undefined) {
        line.textContent = `+${row.count.toLocaleString("en")} more`;
        line.style.opacity = 0.7;
      } else {
        const i = row.id, has = kids[i + 1].length;
        const opened = open.has(i) || (found && found.get(i) === "path");
        if (has) line.setAttribute("aria-expanded", Boolean(opened));
        line.setAttribute("aria-selected", i === model.get("selected"));
        const box = document.createElement("span");
        box.style.cssText = `flex:none;width:12px;height:12px;border-radius:3px;margin:0 6px 0 2px;
          border:1px solid #8a919c;background:${shade(i)}`;
        const text = document.createElement("code");
        text.textContent = d.text[i];
        text.style.cssText = "background:none;color:inherit;flex:1;overflow:hidden;text-overflow:ellipsis";
        const facts = document.createElement("span");  // stays in sight: the text gives way
        facts.textContent = `${d.tokens[i]} tokens` + (d.locks[i] ? ` \u{1F512}${d.locks[i]}` : "");
        facts.style.cssText = "flex:none;margin-left:8px;opacity:.8";
        const mark = document.createElement("span");
        mark.textContent = has ? (opened ? "\u25BE" : "\u25B8") : "";
        mark.style.cssText = "flex:none;width:14px";
        line.append(mark, box, text, facts);
        if (i === model.get("selected")) line.style.fontWeight = 600;
      }
      if (at === active) line.style.outline = "2px solid #0072B2", line.style.outlineOffset = "-2px";
      line.onclick = () => { active = at; act(row); tree.focus(); };
      return line;
    }));
    if (active >= 0) tree.setAttribute("aria-activedescendant", `${uid}-${active}`);
    tree.children[active]?.scrollIntoView({ block: "nearest" });
  }

  function act(row) {
    if (row.more !== undefined) more.set(row.more, (more.get(row.more) || MOST) + 200);
    else {
      if (model.get("selected") === row.id || !open.has(row.id)) open.has(row.id) ? open.delete(row.id) : open.add(row.id);
      model.set("selected", row.id);
      model.save_changes();
      inspect();
    }
    paint();
  }

  function inspect() {
    const i = model.get("selected");
    if (i < 0) { detail.textContent = "Click a node, or open one with Enter, to inspect it."; return; }
    const full = model.get("detail");
    const facts = { text: d.text[i], "length": `${d.tokens[i]} tokens`, pages: d.pages[i], locks: d.locks[i], hits: d.hits[i],
      "last use": d.last[i], namespace: d.namespace[i], requests: d.owner[i], children: kids[i + 1].length };
    if (full.id === i) Object.assign(facts, full.facts);
    const list = document.createElement("dl");
    list.style.margin = "0";
    for (const [name, value] of Object.entries(facts)) {
      if (value === "") continue;
      const [a, b] = [document.createElement("dt"), document.createElement("dd")];
      a.textContent = name; a.style.cssText = "font-weight:600;margin-top:4px";
      b.textContent = value; b.style.cssText = "margin:0 0 0 8px;white-space:pre-wrap";
      list.append(a, b);
    }
    detail.replaceChildren(list);
  }

  function find() {
    const words = search.value.toLowerCase();
    found = null;
    let hits = 0;
    if (words) {
      found = new Map();
      for (let i = 0; i < n && hits < 200; i++) {
        if (!d.search[i].includes(words)) continue;
        hits += 1;
        if (!found.has(i)) found.set(i, "hit");
        for (let p = d.parent[i]; p >= 0; p = d.parent[p]) found.set(p, "path");
      }
    }
    const few = hits === 200 ? "first 200" : hits;
    status.textContent = words ? `${few} nodes hold this text` : `${n.toLocaleString("en")} nodes`;
    active = -1;
    paint();
  }

  tree.addEventListener("keydown", (e) => {
    const row = rows[active];
    const parent = () => { let j = active; while (j > 0 && rows[j].level >= row.level) j--; return j; };
    if (e.key === "ArrowDown") active = Math.min(rows.length - 1, active + 1);
    else if (e.key === "ArrowUp") active = Math.max(0, active - 1);
    else if (e.key === "Home") active = 0;
    else if (e.key === "End") active = rows.length - 1;
    else if (e.key === "ArrowRight" && row?.id !== undefined) open.has(row.id) ? active++ : open.add(row.id);
    else if (e.key === "ArrowLeft" && row) row.id !== undefined && open.has(row.id) ? open.delete(row.id) : active = parent();
    else if ((e.key === "Enter" || e.key === " ") && row) act(row);
    else if (e.key === "/") search.focus();
    else return;
    e.preventDefault();
    e.stopPropagation();
    paint();
  });
  search.addEventListener("input", find);
  search.addEventListener("keydown", (e) => e.stopPropagation());
  colour.addEventListener("change", paint);
  model.on("change:detail", inspect);
  const uid = "t" + Math.random().toString(36).slice(2, 8);
  find();
  inspect();
}
export default { render };
