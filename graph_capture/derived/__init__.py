"""Graphs made from graphs: as eager runs it, of another size, in blocks, on one rank."""
