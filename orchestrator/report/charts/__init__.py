"""The charts of a report, drawn with Altair as SVG and PNG."""
