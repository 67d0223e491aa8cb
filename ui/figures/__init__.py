"""Pure functions from tables and verdicts to plotly figures. The app and the report draw the same ones."""
