"""A small picture as SVG text, for a page or for a file of its own.

Lines and letters take the colour of what is around them, so one text serves light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Picture:
    """Elements in the order in which they are drawn, on a plane of whole units."""

    def __init__(self, width: int, height: int, says: str) -> None:
        self.width, self.height, self.says = width, height, says
        self.elements: list[str] = []

    def boxes(self, rects: Iterable[tuple[int, int, int, int]], colour: str, title: str = "",
              *, opacity: float = 1.0) -> None:  # fmt: skip
        """Rectangles of one colour: x, y, width, height of each."""
        path = "".join(f"M{x} {y}h{w}v{h}h{-w}z" for x, y, w, h in rects)
        if path:
            faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
            self._add("path", f'fill="{colour}"{faint} d="{path}"', title)

    def area(self, points: Iterable[tuple[int, int]], base: int, colour: str) -> None:
        """What lies between steps, each of which ends at its x, and the line at `base`."""
        steps = list(points)
        if steps:
            path = f"M{steps[0][0]} {base}" + "".join(f"V{y}H{x}" for x, y in steps)
            self._add("path", f'fill="{colour}" d="{path}V{base}z"', "")

    def frame(self, x: int, y: int, width: int, height: int, *, dashed: bool = False) -> None:
        """The outline of a rectangle."""
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self._add(
            "rect",
            f'x="{x}" y="{y}" width="{width}" height="{height}" fill="none" '
            f'stroke="currentColor" stroke-opacity=".6"{dash}', "",
        )  # fmt: skip

    def line(self, x: int, y: int, to_x: int, colour: str) -> None:
        """A dashed line across."""
        self._add(
            "path", f'd="M{x} {y}H{to_x}" stroke="{colour}" stroke-width="2" '
            'stroke-dasharray="8 5" fill="none"', "",
        )  # fmt: skip

    def text(self, x: int, y: int, said: str, anchor: str = "start") -> None:
        """Letters that begin, end or are centred at x."""
        at = f'x="{x}" y="{y}" text-anchor="{anchor}"'
        self.elements.append(f'<text {at} fill="currentColor">{escape(said)}</text>')

    def legend(self, x: int, y: int, colours: Iterable[tuple[str, str]], step: int = 150) -> None:
        """Names with their colours, in one row."""
        for i, (name, colour) in enumerate(colours):
            self.boxes([(x + i * step, y - 11, 12, 12)], colour)
            self.text(x + i * step + 18, y, name)

    def inline(self) -> str:
        """For a page, whose ink it takes."""
        return self._whole(f'class="picture" style="max-width: {self.width}px"')

    def file(self, ink: str) -> str:
        """For a file of its own."""
        return self._whole(
            f'xmlns="http://www.w3.org/2000/svg" color="{ink}" font-family="sans-serif"'
        )

    def _whole(self, attributes: str) -> str:
        body = "\n".join(self.elements)
        return (
            f'<svg {attributes} viewBox="0 0 {self.width} {self.height}" font-size="13" role="img" '
            f'aria-label="{escape(self.says)}">\n{body}\n</svg>\n'
        )

    def _add(self, name: str, attributes: str, title: str) -> None:
        end = f"><title>{escape(title)}</title></{name}>" if title else "/>"
        self.elements.append(f"<{name} {attributes}{end}")


def stacked(*pictures: Picture) -> Picture:
    """One below the other, in one picture."""
    says = "; ".join(picture.says for picture in pictures)
    whole = Picture(max(p.width for p in pictures), sum(p.height for p in pictures), says)
    down = 0
    for picture in pictures:
        body = "\n".join(picture.elements)
        whole.elements.append(f'<g transform="translate(0 {down})">\n{body}\n</g>')
        down += picture.height
    return whole
