"""The GSM8K sweep: plain decoding against DFlash across TP sizes and concurrencies."""
