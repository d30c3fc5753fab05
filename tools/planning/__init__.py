"""`slipstream plan`: which fleet serves a load best."""
