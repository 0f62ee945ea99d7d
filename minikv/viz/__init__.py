"""Pictures of live objects: SVG for notebooks, text for terminals, one legend for all.

Every function below returns a :class:`~minikv.viz.style.Drawing` unless said: it is shown as the
value of a cell, printed as text, saved with ``.save("x.svg")``, and gives its numbers with
``.table()``. Caches, allocators and request tables draw themselves as the value of a cell. What
comes after ``*`` is optional and passed by name.

`requests` are a list, or a dict by letter, of objects with ``token_ids, computed, row, node``
(``cached_tokens`` are hatched; slots are read from `table`), or of plain lists of slots. `decode`
is a tokenizer, a function of a list of ids, or texts by id. `who` is a request's letter.

Memory and prefix tree
    - ``tree.draw(cache, *, decode, requests, colour_by, reused, computed, evicted, reused_tokens,
      who, note,
      max_nodes)``: the radix tree; `colour_by` is "recency", "hits" or "owner"; nodes in `reused`
      are hatched, in `computed` solid.
    - ``tree_frames.frames(recorder, *, kinds, who, decode)``: a list, a drawing per event of
      ``cache.record()``.
    - ``dot.draw(cache, *, decode, requests)``, ``dot.graph(...)``: the same tree through Graphviz.
    - ``pages.draw(allocator, *, requests, cache, table, decode)``: every page, who holds it, the
      free list in order.
    - ``pages.page_table(allocator, requests, *, who, cache, table, decode)``: logical above,
      memory below, arrows.
    - ``requests.draw(table, *, requests, decode, page_size)``: request rows with a slot under
      each token.
    - ``requests.block_table(requests, page_size, *, table)``: a page number per request and block.
    - ``memory_over_time.draw({policy: [{used, internal, reserved, external}]}, capacity, *, unit,
      time)``: waste.
    - ``memory_over_time.strip([{who, start, used, reserved}], size, *, refused, page_size,
      note)``: slot by slot.

Batches and attention
    - ``batch.draw(qo_indptr, kv_indptr, kv_indices, *, tokens, decode, letters, page_size)``: the
      ragged batch.
    - ``batch.of_batch(batch, table, ...)``: the same of a live engine batch.
    - ``order.draw(requests, *, decode, least)``: prompts in the order in which they ran, reused
      and computed tokens.
    - ``attention.draw(new_len, prefix_len, *, causal, sliding_window, mask, row, tile, tokens,
      decode, who)``: the triangle.
    - ``tiles.walk(scores, values, slots, *, tile, texts, who)``: a list of frames of the online
      softmax with m, l, acc.
    - ``tiles.steps(scores, values, tile)``: the numbers of that walk, a list of dicts.
    - ``tiles.load_map(counts, *, ideal, programs, page_size, unit)``: heat map of which program
      loads which slot.

Time and limits
    - ``timeline.draw(events, *, by)``: Gantt of an engine's event log over its pool level; by
      "step" or "time".
    - ``timeline.lanes({lane: [(start, stop, label)]}, *, unit)``: CPU and GPU lanes, or the SMs
      of a chip.
    - ``roofline.draw([{name, intensity, flops}], *, bandwidth, peak, where)``: dots of work under
      the machine's roof.
    - ``calculator.overview(dtype)``, ``calculator.draw(model, context, batch, dtype, memory)``:
      memory of K and V;
      ``calculator.kv_bytes(model, tokens, dtype)``, ``calculator.SHAPES``: the numbers;
      ``calculator.widget()``.

To step through and to play with (each shows a static picture first; ``.widget`` is the rest)
    - ``player.Player(frames, *, interval, static)``: steps through drawings in the browser,
      without a kernel.
    - ``playground.Playground(tokenizer, *, page_size, pages, eviction, prompts)``: type prompts,
      see match, split
      and share; ``.run(text, hold=False)``, ``.preview(text)``, ``.evict_one()``, ``.finish()``,
      ``.reset()``, ``.steps()``, ``.log``.
    - ``inspector.Inspector(cache, *, decode, requests, colour_by)``: search and open the nodes of
      a large tree.
    - ``widgets.Live(draw, **controls)``: a picture that follows controls of your own.
    - ``reorder.Reorder(letters)``: a control whose value is an order, changed by dragging or by
      arrow keys.

Style
    - ``style.legend()``: every mark; ``style.request("A")``: a request's letter, colour and ink.
    - ``style.chart(title, xlabel, ylabel)``: Matplotlib figure and axes (several ylabels: several
      panels);
      ``style.limit_line(axes, value, label)``; ``style.finish_chart(figure, desc, data)``: the
      figure as a drawing.
    - ``example.REQUESTS, SYSTEM, WORDS, decode, PAGE_SIZE, NUM_PAGES``: the running example.
"""
