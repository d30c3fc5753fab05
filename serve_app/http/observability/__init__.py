"""What is told of requests to those who watch: records, traces, and sums by the version of a prompt."""
