"""The charts of a report, drawn with Vega-Lite as SVG and PNG."""
