"""What calls, streams and arrays cost through actors."""
