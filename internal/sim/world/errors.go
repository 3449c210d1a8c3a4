package world

import "fmt"

// Error is a refusal with the cloud's own code and message.
type Error struct {
	Code    string // e.g. InvalidInstanceID.NotFound
	Status  int    // HTTP status
	Message string
}

func (e *Error) Error() string {
	return fmt.Sprintf("cannot do what was asked: %s: %s", e.Code, e.Message)
}

// Refuse returns an Error with HTTP status 400.
func Refuse(code, format string, args ...any) *Error {
	return &Error{Code: code, Status: 400, Message: fmt.Sprintf(format, args...)}
}

func refuse(status int, code, format string, args ...any) *Error {
	return &Error{Code: code, Status: status, Message: fmt.Sprintf(format, args...)}
}
