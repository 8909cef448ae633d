package main

import (
	"math"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

// undone is how long after a refusal the undo of a proposal may arrive at the masters: the longest
// round of 6 s, and as long again for a master that stood still.
const undone = 12 * time.Second

// mostUnknowns is how many operations without an end a history may have.
const mostUnknowns = 4

// history records the operations on one lock.
type history struct {
	mutex sync.Mutex
	ops   []porcupine.Operation
}

func (h *history) add(client int, asked request, got answer, call, end int64) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	h.ops = append(h.ops, porcupine.Operation{
		ClientId: client, Input: asked, Call: call, Output: got, Return: end,
	})
}

// record adds an operation. One whose outcome is unknown may take effect at any later time.
func (h *history) record(client int, asked request, got answer, call, end int64) {
	isUnknown := got.outcome == unknown
	switch {
	case asked.kind == release && isUnknown:
		h.add(client, asked, got, call, math.MaxInt64)
	case (asked.kind == extend || asked.kind == get) && isUnknown:
		// Without an answer, neither changes what the model knows.
	case asked.kind == acquire && isUnknown:
		for _, kind := range []kind{ghostBegins, ghostEnds} {
			h.add(client, request{kind, asked.lock, asked.owner}, got, call, math.MaxInt64)
		}
	default:
		h.add(client, asked, got, call, end)
	}
}

// decided returns the operations that the checker can judge, and how many it judges only in part or
// not at all. The proposal of another acquire may refuse a request or appear in a `GET`, and fail
// afterwards. So while another acquire is under way, or was refused shortly before, no unknown token
// in a `GET` is judged. A refused acquire is then judged only by one rule: its owner is not the holder.
func (h *history) decided() (ops []porcupine.Operation, leftOut int) {
	tokens := map[int64]bool{}
	for _, op := range h.ops {
		if got := op.Output.(answer); op.Input.(request).kind == acquire && got.outcome == granted {
			tokens[got.fencing] = true
		}
	}
	for _, op := range h.ops {
		asked, got := op.Input.(request), op.Output.(answer)
		isRefusal := asked.kind == acquire && got.outcome == held
		isStrange := asked.kind == get && got.outcome == held && !tokens[got.fencing]
		if (isRefusal || isStrange) && h.hasProposals(op) {
			leftOut++
			if isStrange {
				continue
			}
			op.Output = answer{refused, 0}
		}
		ops = append(ops, op)
	}
	return ops, leftOut
}

// hasProposals is whether another request may have had a proposal during an operation.
func (h *history) hasProposals(op porcupine.Operation) bool {
	for _, other := range h.ops {
		asked, got := other.Input.(request), other.Output.(answer)
		mayPropose := asked.kind == acquire || asked.kind == ghostBegins
		if !mayPropose || asked.owner == op.Input.(request).owner {
			continue
		}
		ends := other.Return
		if got.outcome != granted && ends != math.MaxInt64 {
			ends += int64(undone)
		}
		if other.Call <= op.Return && op.Call <= ends {
			return true
		}
	}
	return false
}

// unknowns is how many operations may take effect at any later time.
func (h *history) unknowns() int {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	unknowns := 0
	for _, op := range h.ops {
		if op.Return == math.MaxInt64 && op.Input.(request).kind != ghostEnds {
			unknowns++
		}
	}
	return unknowns
}

// violations are the kinds of violations that are planted.
var violations = []string{
	"a second holder", "a free lock", "a wrong holder", "a lost lease", "a refused release",
	"a smaller fencing token", "a refused repetition",
}

// plants returns copies of a history with one violation each, which a checker must find.
func plants(ops []porcupine.Operation) map[string][]porcupine.Operation {
	plants := map[string][]porcupine.Operation{}
	var earlier *porcupine.Operation
	for index, op := range ops {
		asked, got := op.Input.(request), op.Output.(answer)
		if asked.kind != acquire || got.outcome != granted {
			continue
		}
		if earlier != nil && earlier.Return < op.Call {
			plants["a smaller fencing token"] = withSmallerToken(ops, index, *earlier)
		}
		// The owner surely holds the lock from its grant to its next request.
		ends := int64(math.MaxInt64)
		for _, other := range ops {
			if other.Input.(request).owner == asked.owner && other.Call > op.Return {
				ends = min(ends, other.Call)
			}
		}
		if ends == math.MaxInt64 || ends-op.Return < 4 {
			continue
		}
		earlier = &op
		for what, planted := range map[string]struct {
			kind  kind
			owner string
			got   answer
		}{
			"a second holder":      {acquire, "planted", answer{granted, got.fencing + 1}},
			"a free lock":          {get, "", answer{notHeld, 0}},
			"a wrong holder":       {get, "", answer{held, got.fencing - 1}},
			"a lost lease":         {extend, asked.owner, answer{notHeld, 0}},
			"a refused release":    {release, asked.owner, answer{notHeld, 0}},
			"a refused repetition": {acquire, asked.owner, answer{refused, 0}},
		} {
			one := porcupine.Operation{
				ClientId: op.ClientId, Input: request{planted.kind, asked.lock, planted.owner},
				Call: op.Return + 1, Output: planted.got, Return: ends - 1,
			}
			plants[what] = append(append([]porcupine.Operation{}, ops...), one)
		}
	}
	return plants
}

// withSmallerToken returns a copy in which a grant has a smaller token than an earlier one. It leaves
// out what else the owner of that grant was answered, because it shows the right token.
func withSmallerToken(
	all []porcupine.Operation, index int, earlier porcupine.Operation,
) []porcupine.Operation {
	owner := all[index].Input.(request).owner
	var ops []porcupine.Operation
	for at, op := range all {
		if at == index {
			op.Output = answer{granted, earlier.Output.(answer).fencing - 1}
		} else if op.Input.(request).owner == owner {
			continue
		}
		ops = append(ops, op)
	}
	return ops
}
