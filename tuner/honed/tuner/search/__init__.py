"""The search for better schedules: what may be tried on which device, and what to try next."""
