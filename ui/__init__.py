"""The Streamlit app and the HTML report. Reads run directories, never the engine process."""
