package redlock

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrReleased is the cause of a guard's context after [Guard.Release], and what [Guard.Check] says then.
var ErrReleased = errors.New("the lock was released by its guard")

// Problem is a gateway's error answer (RFC 9457).
type Problem struct {
	// Status is the HTTP status.
	Status int
	// Code is the kind of problem, as a word to program against: "invalid_ttl". It is "proxy" or "not_a_gateway" when something
	// else than a gateway answered.
	Code string
	// Detail says what happened, with the value and what is allowed.
	Detail string
	// RequestID is what to look for in the gateway's log; empty if it was not told.
	RequestID string
	// Holder is the label of whoever holds the lock; empty if it has none.
	Holder string
	// ExpiresIn is when the holder's lock expires unless it is extended; 0 if it was not told.
	ExpiresIn time.Duration
	// RetryAfter is when trying again makes sense; 0 if it was not told.
	RetryAfter time.Duration
}

// String is for people: code, status and detail.
func (p Problem) String() string {
	return fmt.Sprintf("%s (%d): %s", p.Code, p.Status, p.Detail)
}

// HeldError says that somebody else has the lock, and had it until the wait ended.
type HeldError struct {
	// Name is the lock's.
	Name string
	Problem
}

func (e *HeldError) Error() string {
	text := fmt.Sprintf("the lock %q is held by %s", e.Name, label(e.Holder))
	if e.ExpiresIn > 0 {
		text += fmt.Sprintf("; it expires in %.1f s unless it is extended", e.ExpiresIn.Seconds())
	}
	return text
}

// RefusedError says that the gateway refuses the request as it is; a repetition would be refused too. Detail says what is
// allowed.
type RefusedError struct {
	Problem
}

func (e *RefusedError) Error() string {
	return "the gateway refused: " + e.String()
}

// UnavailableError says that no gateway decided.
type UnavailableError struct {
	// What is the last thing that was heard of each URL.
	What []string
	// Last is the last answer of a gateway; nil if there was none.
	Last *Problem
}

func (e *UnavailableError) Error() string {
	return "no gateway decided: " + strings.Join(e.What, "; ")
}

// SetupError says that nothing was asked: what was given cannot work.
type SetupError struct {
	// What is wrong, with the value.
	What string
}

func (e *SetupError) Error() string {
	return e.What
}

// LossReason is a word for why a lock was lost.
type LossReason string

const (
	// Gone means that it is free: somebody else released it, or it has expired.
	Gone LossReason = "gone"
	// Taken means that somebody else holds it.
	Taken LossReason = "taken"
	// MaxHold means that it was held for as long as a lock may be.
	MaxHold LossReason = "max_hold"
	// Unconfirmed means that no gateway has confirmed an extension, and its deadline is near or has passed.
	Unconfirmed LossReason = "unconfirmed"
)

// LostError says that a lock is not held any more, or may not be. It is the cause of the guard's context then.
type LostError struct {
	// Name is the lock's.
	Name string
	// Reason is a word to program against.
	Reason LossReason
	// Detail is what the gateways said.
	Detail string
	// Holder is the label of whoever holds it now, with the reason Taken; empty if it was not told.
	Holder string
}

func (e *LostError) Error() string {
	why := map[LossReason]string{
		Gone:        "it was released by somebody else or has expired",
		Taken:       label(e.Holder) + " holds it",
		MaxHold:     "it was held for as long as it may be",
		Unconfirmed: "no gateway has confirmed an extension before its deadline",
	}[e.Reason]
	return fmt.Sprintf("the lock %q was lost: %s (%s)", e.Name, why, e.Detail)
}

func label(holder string) string {
	if holder == "" {
		return "somebody else"
	}
	return fmt.Sprintf("%q", holder)
}

// isLoss is whether a gateway says by this that a token holds its lock no more. A page of a proxy has a status too.
func (p Problem) isLoss() bool {
	return p.Code == "lock_not_found" || p.Code == "not_holder" || p.Code == "max_hold_reached"
}

func (p Problem) asLoss(name string) *LostError {
	reason := Taken
	switch p.Code {
	case "lock_not_found":
		reason = Gone
	case "max_hold_reached":
		reason = MaxHold
	}
	return &LostError{Name: name, Reason: reason, Detail: p.Detail, Holder: p.Holder}
}
