"""Where engines differ, for those who do not compute: who keeps the pages, and which arguments one takes."""
