"""Who may call, as which tenant, and how much: API keys, tiers and their limits."""
