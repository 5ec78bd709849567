"""Which sample comes when, and what it needs: functions of (seed, position) that read nothing."""
