"""One table, one chart and one page writer, for report, analyze and benchmark."""
