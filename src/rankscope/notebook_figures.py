"""Figures of a notebook that survive `jupyter nbconvert --to html`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.display import HTML


def embed_figures() -> HTML:
    """Keep the figures of this notebook in the pages that are made of it.

    By itself, a notebook holds a figure in a form that only Jupyter draws. From this call on it
    holds an HTML form as well. The value belongs into the cell's output: it is the library that
    draws them, once, 5 MB. Neither it nor the figures make a request to another host.

    Example:
        >>> embed_figures()
    """
    import plotly.io as pio
    from IPython.display import HTML
    from plotly.io.base_renderers import MimetypeRenderer  # type: ignore[import-untyped]
    from plotly.offline import get_plotlyjs

    class PageRenderer(MimetypeRenderer):  # type: ignore[misc]
        def to_mimebundle(self, fig_dict: dict[str, Any]) -> dict[str, str]:
            html = pio.to_html(
                fig_dict,
                config={"responsive": True, "showSendToCloud": False, "displaylogo": False},
                include_plotlyjs=False,
                include_mathjax=False,
                full_html=False,
                default_height="450px",
                validate=False,
            )
            return {"text/html": html}

    pio.renderers["rankscope"] = PageRenderer()
    pio.renderers.default = "plotly_mimetype+rankscope"
    return HTML(f"<script>{get_plotlyjs()}</script>")  # type: ignore[no-untyped-call]
