// Package fleet holds the records of a fleet of cloud workers and the only ways
// to read and change them . It decides and records, and communicates neither
// with a cloud nor with CML.
//
// A Fleet is made by New over a store.Store. Its methods are the commands and
// queries of the contract:
//
//	workers     CreateWorker ImportWorker UpdateWorker ForgetWorker Worker Workers ScaleUp
//	power       PauseWorker StopWorker StartWorker ResumeWorker DrainWorker CancelDrain
//	            TerminateWorker RetryWorker WakeWorker NewWakeToken
//	idleness    SnoozeWorker SetIdleDetection ArmWorker UpdateWorkerActivity Settle
//	            GetWorkerIdleStatus GetWorkerActivity GetWorkerTelemetryEvents GetWorkerEC2State
//	owner       AskOwner Await Request Answer (detect-idle is a Request; its answer a DetectResult)
//	license     RegisterLicense DeregisterLicense
//	templates   Template Templates PutTemplate DeleteTemplate
//	settings    Settings AllSettings PutSettings Refresh Run; Resolve reads layers, FileLayer makes one
//	rules       PolicyWith Policy Rules; PutPolicy PutSchedule PutBudget AddOverride Apply and their like
//	audit       Audit ExportAudit TrimAudit
//	notices     Deliveries DeadLetters RetryDead DropDead; Links ReadAnswer AnswerWarning
//	halt        SetHalt Halted
//	discovery   Discovered PutDiscovered WorkerOf
//
// Errors are *NotFound (404), *Invalid with its field (422), *Refused with a
// reason code and the blocks (409), *Conflict and ErrStale (409 or 412), a
// *power.IllegalError, or those of the store (503).
//
// Every write is one compare-and-swap transaction, which also contains its
// domain events and audit entries (their IDs are the store's revisions), the
// pool record when a worker goes up or down, and the guards of the view
// (Guarded). No write makes a transition that package power does not have.
// Every pause is counted once, when its intent is durable, and every resume
// once, when RUNNING is confirmed. An automatic pause is decided in the
// transaction that records it, against the floor, the cooldown and the halt at
// that time.
//
// Not in this package: when workers are observed and commands carried out
// (internal/controller), authorization (internal/server) and the definition of
// idleness (package idle).
package fleet
