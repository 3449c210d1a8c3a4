// Package fleet holds the records of a fleet of cloud workers and the only ways
// to read and change them. It decides and records, and communicates neither
// with a cloud nor with CML.
//
// A Fleet is made by New over a store.Store. Its own methods are the commands
// and queries of workers. Those of its parts, which it embeds, are in the
// packages below:
//
//	worker    the record, its transitions, and how a worker is judged (no I/O)
//	rules     policies, schedules, groups, overrides, budgets: PutPolicy, AddOverride, Budgets
//	settings  settings with their sources: Settings, AllSettings, PutSettings
//	audit     the audit log with its domain events: Audit, NewestAudit, ExportAudit
//	channel   notification channels and their outbox: Deliveries, RetryDead
//	launch    templates, user data and enrollment: Template, PutTemplate, LaunchCall
//	halt      the switch of all automatic actions: Halted, SetHalt
//	warning   what users are told before a pause, and the answers in its links
//	sealed    secrets as references or encrypted
//
// Errors are *NotFound (404), *Invalid with its field (422), *Refused with a
// reason code and the blocks (409), *Conflict (all of package failure), ErrStale (409 or 412), a
// *power.IllegalError, or those of the store (503).
//
// Every write is one compare-and-swap transaction. It also contains the domain events
// and audit entries (whose IDs are the store's revisions), the pool record when a
// worker goes up or down, and the guards of the view (Guarded). No write makes a
// transition that package power does not have.
//
// Every pause is counted once, when its intent is durable, and every resume once, when
// RUNNING is confirmed. An automatic pause is decided in the transaction that records
// it, against the floor, the cooldown and the halt at that time.
//
// Other packages observe workers and carry out commands (controller), authorize
// (server) and define idleness (idle).
package fleet
