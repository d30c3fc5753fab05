"""What a router audits: which ended requests are decided again plainly, where, and what a difference means."""
