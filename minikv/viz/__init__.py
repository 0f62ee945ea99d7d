"""Pictures of live objects: SVG for notebooks, text for terminals, one legend for all.

Every function returns a :class:`~minikv.viz.style.Drawing`: show it as a cell's value or ``print`` it, ``.save("x.svg")``
it, or read its numbers with ``.table()``. `requests` are always a list or a dict by letter, of objects with
``token_ids, computed, row, node`` (their slots are read from `table`) or of plain lists of slots; `decode` is a tokenizer,
a function of a list of ids, or texts by id. Caches, allocators and request tables draw themselves as a cell's value.

=======================  ==========================================================================================
``style.legend``         ``()``: the legend; ``style.request("A")``: a request's letter, colour and ink
``style.chart``          ``(title, xlabel, ylabel)``: figure and axes for a plot of your own; several ylabels, several panels
``style.limit_line``     ``(axes, value, label, vertical=False)``: the dashed line of a limit
``style.finish_chart``   ``(figure, desc, data)``: a figure as a ``Drawing``
``tree.draw``            ``(cache, decode, requests, colour_by, reused, computed, evicted, who, note, max_nodes)``: radix tree
``tree_frames.frames``   ``(recorder, kinds, who, decode)``: a drawing per event of ``cache.record()``, for the player
``dot.draw, dot.graph``  ``(cache, decode, requests)``: the same tree through Graphviz
``pages.draw``           ``(allocator, requests, cache, table, decode)``: physical memory, who holds what, the free list
``pages.page_table``     ``(allocator, requests, who, cache, table, decode)``: logical order above, memory below, arrows
``requests.draw``        ``(table, requests, decode, page_size)``: request rows, a slot under each token
``requests.block_table`` ``(requests, page_size, table)``: a page number per request and block
``batch.draw``           ``(qo_indptr, kv_indptr, kv_indices, tokens, decode, letters, page_size)``: the ragged batch
``batch.of_batch``       ``(batch, table)``: the same of a live engine ``Batch``
``attention.draw``       ``(new_len, prefix_len, causal, sliding_window, mask, row, tile, tokens, decode, who)``: triangle, masks
``tiles.walk``           ``(scores, values, slots, tile, texts, who)``: frames of the online softmax with m, l, acc
``tiles.steps``          ``(scores, values, tile)``: the numbers of that walk
``tiles.load_map``       ``(counts, ideal, programs, page_size)``: heat map of which program loads which slot
``roofline.draw``        ``(points, bandwidth, peak, where)``: dots of work under the machine's roof
``memory_over_time``     ``.draw(levels, capacity)``: waste per policy; ``.strip(segments, size, refused)``: memory slot by slot
``timeline.draw``        ``(events, by="step")``: Gantt of an engine's event log over its pool level
``timeline.lanes``       ``(spans, unit)``: CPU and GPU lanes, or the SMs of a chip
``calculator``           ``.overview(dtype)``, ``.draw(model, context, batch, dtype, memory)``, ``.widget()``, ``.kv_bytes(model, tokens)``
``player.Player``        ``(frames, interval, static)``: steps through drawings in the browser, without a kernel
``playground``           ``.Playground(tokenizer, page_size, pages, eviction, prompts)``: type prompts, see match, split, share
``inspector.Inspector``  ``(cache, decode, requests, colour_by)``: search and open the nodes of a large tree
``widgets.Live``         ``(draw, **controls)``: a picture that follows controls of your own
``example``              the running example: ``REQUESTS, SYSTEM, WORDS, decode, PAGE_SIZE, NUM_PAGES``
=======================  ==========================================================================================

Options not shown, and what each argument means, stand in the functions' own help. Keyword arguments are keyword-only
after the objects that are drawn.
"""
