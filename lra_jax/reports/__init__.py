"""One page writer and one chart style, for report, analyze and benchmark."""
