package redlock

import (
	"context"
	"time"
)

// moment is a point on a clock that nobody can set. On Linux the clock runs on while the machine
// sleeps, so a lock is known to be lost after a suspend. The monotonic clock of time.Time stands
// still during a suspend.
type moment time.Duration

// Timers stand still while the machine sleeps, so a long pause is slept in pieces of this length.
const piece = 500 * time.Millisecond

var processStart = time.Now()

func monotonic() moment {
	return moment(time.Since(processStart))
}

func (m moment) add(d time.Duration) moment {
	return m + moment(d)
}

// since returns the time from the earlier moment to m; negative if m is before it.
func (m moment) since(earlier moment) time.Duration {
	return time.Duration(m - earlier)
}

// left returns the time until m; 0 after m.
func (m moment) left() time.Duration {
	return max(0, m.since(now()))
}

func (m moment) hasPassed() bool {
	return m.left() == 0
}

// reached waits for m, also if the machine sleeps meanwhile; false if ctx ended before.
func (m moment) reached(ctx context.Context) bool {
	for {
		left := m.left()
		if left == 0 {
			return ctx.Err() == nil
		}
		if !sleep(ctx, min(left, piece)) {
			return false
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
