// Error boundaries.

import { Component, ComponentChildren } from 'preact'

interface Props { what: string; children: ComponentChildren }

/**
 * Boundary shows what failed in place of its children, and draws them again
 * whenever its parent has something new.
 */
export class Boundary extends Component<Props, { error?: Error }> {
  static getDerivedStateFromError(error: unknown) {
    return { error: error instanceof Error ? error : new Error(String(error)) }
  }

  componentWillReceiveProps() {
    if (this.state.error) this.setState({ error: undefined })
  }

  render() {
    const e = this.state.error
    if (!e) return this.props.children
    return (
      <div class="fault" role="alert">
        <p><strong>Cannot show {this.props.what}.</strong> {e.message}</p>
        <details><summary>Details for a bug report</summary><pre>{e.stack ?? String(e)}</pre></details>
        <button type="button" onClick={() => this.setState({ error: undefined })}>Retry</button>
      </div>
    )
  }
}
