"""Receivers of alerts: webhooks and Alertmanager."""
