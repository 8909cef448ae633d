// Package redlock holds locks of a redlock-gateway: it acquires a lock, extends it while work goes on, and tells at once when it
// is lost.
//
//	client, err := redlock.New(redlock.Config{URLs: []string{"http://127.0.0.1:8080"}})
//	…
//	err = client.WithLock(ctx, "reports/nightly", func(ctx context.Context, guard *redlock.Guard) error {
//		return write(ctx, guard.FencingToken()) // ctx is cancelled when the lock is lost
//	}, redlock.TTL(30*time.Second), redlock.Wait(time.Minute))
//
// A guard is extended at a third of its validity:
//
//	          acquire                 a third of the validity          margin
//	sent ───────┬──────────────────────────────┬──────────────────────────┬──────┬─► time
//	            │ guard                        │ PATCH: a new deadline    │ lost │ deadline
//	                                           └─ 404, 409: lost now
//
// What a guard promises: a lock that could not be extended is told lost while there is still the margin left of the time in
// which nobody else can be granted it. One that was taken away (by force, or by its token) is told at the next extension, and
// may be another's by then. What it cannot promise: that work which does not look stops. Give [Guard.FencingToken] to whatever
// is written to, and let it refuse smaller ones.
//
// Package api, below this one, is the generated client of every operation, without a guard.
package redlock
